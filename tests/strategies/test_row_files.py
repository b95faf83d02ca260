"""Rows of tables on several replicas as Parquet files."""

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

import tfrs_embed
from delta_checkpoints import PLACEMENTS, Job
from keras_under_test import layers
from process_tiers import on
from strategies.replicas import of_chief
from tfrs_embed.checkpoint import bundle
from tfrs_embed.serving import export_rows, import_rows


@on("mirrored:2", "workers:2", tier="nightly")
@on("mirrored:2", when=lambda placement: placement == "row")
@on("workers:2", tier="more", when=lambda placement: placement == "column")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_workers_export_each_row_once(
    strategy, placement, tmp_path, monkeypatch
):
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 160)  # Ten rows of four.
    job = Job(strategy, placement)
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    folder = of_chief(strategy, tmp_path)
    with strategy.scope():
        job.layer.build(None)
    mirror, since = {}, None
    for number in range(3):
        to = folder / f"{placement} {number}"
        since = export_rows(job.layer, to, since)
        for name, state in job.layer.tables.items():
            path = to / job.layer.name / name
            found = pq.read_table(str(path))
            keys, rows = found["key"].to_pylist(), found["row"].to_pylist()
            assert len({*keys}) == len(keys)
            if number and since[f"{job.layer.name}/{name}"] is not None:
                assert 0 < len(keys) < 40
            known = mirror.setdefault(name, {})
            known.update(zip(keys, rows, strict=True))
            for file in path.glob("_removed-*.parquet"):
                for key in pq.read_table(str(file))["key"].to_pylist():
                    known.pop(key, None)
            values = np.asarray(state.table.numpy(), np.float32)
            expected = range(len(values))
            if state.spec.keys is not None:
                expected = state.keys().tolist()
            assert sorted(known) == [*expected]
            for key, value in zip(expected, values, strict=True):
                assert known[key] == value.tolist()
            parts = len([*path.glob("part-*.parquet")])
            assert parts == (2 if several else 1)
        job.train()
    with pytest.raises((ValueError, RuntimeError), match=r"exists|The export"):
        export_rows(job.layer, to, since)


@on("mirrored:2", "workers:2", tier="more")
def test_workers_with_columns_of_the_same_rows(strategy, tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 2560)  # Ten rows of 64.
    folder = of_chief(strategy, tmp_path)
    with strategy.scope():
        table = tfrs_embed.TableConfig("wide", 60, 64, placement="column")
        layer = layers.PartialTPUEmbedding(
            tfrs_embed.FeatureConfig("wide", table), "adagrad", size_threshold=0
        )
        layer.build(None)
    variable = layer.tables["wide"].table
    several = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    assert variable.is_cut == several
    since = export_rows(layer, folder / "all")

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([3, 42, 41]), training=True))
        tape.gradient(loss, layer.trainable_variables)

    tf.function(lambda: strategy.run(step))()
    values = variable.numpy()
    export_rows(layer, folder / "changed", since)
    for name, keys in (("all", [*range(60)]), ("changed", [3, 41, 42])):
        path = folder / name / layer.name / "wide"
        found = pq.read_table(str(path))
        assert found["key"].to_pylist() == keys
        if name == "changed":
            np.testing.assert_array_equal(
                found["row"].to_pylist(), values[keys]
            )


@on("mirrored:2", "workers:2", tier="nightly")
@on("mirrored:2", when=lambda placement: placement == "row")
@on("workers:2", tier="more", when=lambda placement: placement == "keys")
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_rows_are_imported_everywhere(
    strategy, placement, tmp_path, monkeypatch
):
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 160)
    job, other = (Job(strategy, placement) for _ in range(2))
    for each in (job, other):
        each.build()
    other.layer._name = job.layer.name
    folder, since = of_chief(strategy, tmp_path), None
    for number in range(3):
        to = folder / f"{placement} {number}"
        since = export_rows(job.layer, to, since, slots=True)
        import_rows(other.layer, to, slots=True)
        for name, table in job.layer.tables.items():
            copy = other.layer.tables[name]
            parts = ["parameters", *table.slots]
            if table.spec.keys is not None:
                parts.append("keys")
            for part in parts:
                np.testing.assert_array_equal(
                    copy.variables[part].numpy(), table.variables[part].numpy()
                )
        job.train()
    with pytest.raises((ValueError, RuntimeError), match=r"no folder|failed"):
        import_rows(other.layer, folder / "none")


@on("workers:2", tier="more")
def test_a_failed_import_is_raised_on_all_workers(strategy, tmp_path):
    job = Job(strategy, "keys")
    job.build()
    folder = of_chief(strategy, tmp_path) / "rows"
    export_rows(job.layer, folder)
    if strategy.cluster_resolver.task_id == 1:
        folder = folder / "none"
    with pytest.raises((ValueError, RuntimeError), match=r"no folder|another"):
        import_rows(job.layer, folder)
