"""What a step sends: the formulas of docs/scaling.md, by the counters."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from helpers import differentiate
from strategies.replicas import distribute, local_ids
from tfrs_embed.distribution.replicas import bucket_of

ROWS, DIM = 1000, 4


def train_once(strategy, tables, ids):
    configs = {
        str(i): tfrs_embed.FeatureConfig(
            str(i), tfrs_embed.TableConfig(f"table {i}", ROWS, DIM)
        )
        for i in range(tables)
    }
    with strategy.scope():
        layer = tfrs_embed.PartialTPUEmbedding(configs, "sgd", size_threshold=0)

    def step(ids):
        with tf.GradientTape() as tape:
            outputs = layer(dict(zip(configs, tf.unstack(ids), strict=True)))
            loss = tf.add_n([tf.reduce_sum(v) for v in outputs.values()])
        differentiate(tape, loss, layer.trainable_variables)

    tf.function(lambda ids: strategy.run(step, (ids,)))(
        distribute(strategy, ids)
    )
    return layer.tpu_embedding.engine.traffic()


def draw(strategy, tables, number=50):
    rng = np.random.default_rng(tables)
    return [
        rng.integers(0, ROWS, (tables, number))
        for _ in range(strategy.num_replicas_in_sync)
    ]


@pytest.mark.parametrize("tables", [1, 5])
def test_bytes_are_those_of_the_formula(strategy, tables):
    world = strategy.num_replicas_in_sync
    ids = draw(strategy, tables)
    unique = [[set(table.tolist()) for table in each] for each in ids]
    counts = np.array(
        [
            [
                sum(i % world == shard for table in each for i in table)
                for shard in range(world)
            ]
            for each in unique
        ]
    )
    capacity = int(bucket_of(tf.constant(counts.max()))[0])
    assert counts.max() <= capacity <= max(8, counts.max() * 9 / 8)
    found = train_once(strategy, tables, ids)
    for replica, traffic in zip(local_ids(strategy), found, strict=True):
        remote = counts[replica].sum() - counts[replica][replica]
        assert traffic.unique_keys == counts[replica].sum()
        assert traffic.least_bytes == remote * (8 + 8 * DIM)
        assert traffic.bytes == (world - 1) * (
            8 * (1 + capacity) + 8 * DIM * capacity
        )


def test_collectives_do_not_grow_with_the_number_of_tables(strategy):
    found = {
        tables: train_once(strategy, tables, draw(strategy, tables, 3))
        for tables in (2, 20)
    }
    assert {t.collectives for ts in found.values() for t in ts} == {5}


def test_capacities_are_few_and_close():
    capacities = {}
    for count in (*range(1, 200), *range(200, 20_000, 97)):
        capacity, number = (int(n) for n in bucket_of(tf.constant(count)))
        assert max(8, count) <= capacity <= max(8, count * 9 / 8)
        # A number, and so an instance key, is bound to one capacity.
        assert capacities.setdefault(number, capacity) == capacity
    assert len(capacities) < 120
    assert max(capacities) < 512
