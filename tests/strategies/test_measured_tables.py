"""Statistics of tables that several replicas hold are those of one device."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from process_tiers import on
from strategies.replicas import distribute
from tfrs_embed import monitoring
from training_helpers import differentiate

pytestmark = on("mirrored:2", tier="more")

ROWS, DIM = 101, 4


@pytest.mark.parametrize("placement", ["row", "column", "table", "replicated"])
def test_tables_are_measured(strategy, placement, tmp_path):
    table = tfrs_embed.TableConfig("table", ROWS, DIM, placement=placement)
    # No shard of it holds padding for a row.
    even = tfrs_embed.TableConfig("even", 64, DIM, placement=placement)
    with strategy.scope():
        layer = tfrs_embed.DistributedEmbedding(
            {
                "x": tfrs_embed.FeatureConfig("x", table),
                "y": tfrs_embed.FeatureConfig("y", even),
            },
            optimizer="adagrad",
        )

    @tf.function
    def train(ids):
        def step(ids):
            with tf.GradientTape() as tape:
                found = layer({"x": ids, "y": ids % 64})
                loss = tf.add_n([tf.reduce_sum(v) for v in found.values()])
            differentiate(tape, loss, layer.trainable_variables)

        strategy.run(step, (ids,))

    layer.build(None)
    monitor = monitoring.TableMonitor(layer)
    monitor.measure(0)
    replicas = strategy.num_replicas_in_sync
    ids = np.arange(8 * replicas).reshape(replicas, 8) % 13
    train(distribute(strategy, ids))
    report = monitor.measure(1000)
    log = monitoring.log.StatisticsLog(tmp_path)
    log.write(report)
    log.close()
    assert monitoring.read_log(tmp_path)[0]["step"] == 1000
    for name, rows in (("table", ROWS), ("even", 64)):
        found = report[name]
        values = np.asarray(layer.embedding_tables[name].numpy())
        norms = np.linalg.norm(values, axis=1)
        assert (found.rows, found.rows_read) == (rows, rows)
        assert found.norms[1.0] == pytest.approx(norms.max())
        assert found.untouched_share == 1 - 13 / rows
        assert found.changed_share == pytest.approx(13 / rows)
        assert found.bytes >= 2 * rows * DIM * 4
    counted = [dataclasses.asdict(each) for each in report.replicas]
    if placement == "row":
        assert len(counted) == strategy.num_replicas_in_sync
        assert all(each["unique_keys"] > 0 for each in counted)
        assert 1 <= report.imbalance <= strategy.num_replicas_in_sync
