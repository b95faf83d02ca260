"""Rows of tables as Parquet files."""

import shutil
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

import tfrs_embed
from delta_checkpoints import Job
from keras_under_test import keras, layers
from process_tiers import on
from tfrs_embed.checkpoint import bundle
from tfrs_embed.serving import export_rows
from training_helpers import train

pytestmark = on("keras:3", tier="nightly")

ROWS = 50


@pytest.fixture(autouse=True)
def small_row_groups(monkeypatch):
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 160)  # Ten rows of four.


def read(folder, layer, table):
    """A table's rows by key, and the steps of its file."""
    found = pq.read_table(str(folder / layer / table))
    assert [str(field.type) for field in found.schema] == [
        "int64",
        "fixed_size_list<element: float>[4]",
        "int64",
    ]
    rows = dict(
        zip(found["key"].to_pylist(), found["row"].to_pylist(), strict=True)
    )
    assert len(rows) == len(found)
    return rows, set(found["step"].to_pylist())


def removed(folder, layer, table):
    [file] = (folder / layer / table).glob("_removed-*.parquet")
    return pq.read_table(str(file))["key"].to_pylist()


@pytest.mark.parametrize("placement", ["one", "keys"])
def test_loops_export_what_has_changed(
    placement, tmp_path, both_implementations
):
    job = Job(tf.distribute.get_strategy(), placement)
    job.layer.build(None)
    name, mirror = job.layer.name, {}
    since = None
    for number in range(4):
        folder = tmp_path / str(number)
        since = export_rows(job.layer, folder, since)
        assert not (tmp_path / f"{number}.incomplete").exists()
        for table, state in job.layer.tables.items():
            rows, steps = read(folder, name, table)
            assert steps <= {int(job.layer.step)}
            if number and table != "small":
                assert 0 < len(rows) < 25
            known = mirror.setdefault(table, {})
            known.update(rows)
            keys = range(state.spec.vocabulary_size)
            if placement == "keys" and table != "small":
                keys = state.keys().tolist()
                for key in removed(folder, name, table):
                    known.pop(key, None)
            assert sorted(known) == [*keys]
            np.testing.assert_array_equal(
                [known[key] for key in keys] or np.zeros([0, 4]),
                np.asarray(state.table.numpy(), np.float32),
            )
        job.train()
    assert since[f"{name}/small"] is None


def make(**options):
    """A layer with a large table and one that Keras holds."""
    configs = [
        tfrs_embed.TableConfig("large", ROWS, 4, **options),
        tfrs_embed.TableConfig("small", 5, 4),
    ]
    return layers.PartialTPUEmbedding(
        {
            each.name: tfrs_embed.FeatureConfig(each.name, each)
            for each in configs
        },
        "adagrad",
        size_threshold=20,
        name="places",
    )


def update(layer):
    ids = {"large": tf.constant([3, 7]), "small": tf.constant([1, 2])}
    train(layer, ids, {name: tf.ones([2, 4]) for name in ids})


def test_row_groups_are_of_bounded_size(tmp_path):
    layer = make()
    layer.build(None)
    export_rows(layer, tmp_path / "all")
    [file] = (tmp_path / "all/places/large").iterdir()
    metadata = pq.ParquetFile(str(file)).metadata
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    assert [group.num_rows for group in groups] == [10] * 5


def test_layers_of_one_name_have_folders_of_their_own(tmp_path):
    inputs = {
        n: keras.Input([], dtype="int64", name=n) for n in ("large", "small")
    }
    inner = keras.Model(inputs, make()(inputs))
    model = keras.Model(inputs, [make()(inputs), inner(inputs)])
    since = export_rows(model, tmp_path / "rows")
    assert {path.name for path in (tmp_path / "rows").iterdir()} == {
        "places",
        "places_1",
    }
    assert [*since] == [
        *("places/large", "places/small"),
        *("places_1/large", "places_1/small"),
    ]


def test_no_name_leads_out_of_the_folder(tmp_path):
    configs = [tfrs_embed.TableConfig(name, ROWS, 4) for name in (".", "..")]
    layer = layers.PartialTPUEmbedding(
        {
            each.name: tfrs_embed.FeatureConfig(each.name, each)
            for each in configs
        },
        "adagrad",
        name="places",
    )
    layer.build(None)
    since = export_rows(layer, tmp_path / "a" / "rows")
    assert [*since] == ["places/%2E", "places/%2E."]
    assert [*tmp_path.rglob("*.parquet")] and {
        *tmp_path.rglob("*.parquet")
    } == {
        tmp_path / "a" / "rows" / name / "part-00000.parquet" for name in since
    }
    for name in ("%2E", "%2E."):
        rows, _ = read(tmp_path / "a" / "rows", "places", name)
        assert len(rows) == ROWS


def test_a_folder_that_was_left_is_removed_without_following_links(tmp_path):
    victim, left = tmp_path / "victim", tmp_path / "rows.incomplete"
    for path in (victim, left):
        path.mkdir()
    (victim / "file").write_text("mine")
    (left / "link").symlink_to(victim)
    layer = make()
    layer.build(None)
    export_rows(layer, tmp_path / "rows")
    left.symlink_to(victim)
    shutil.rmtree(tmp_path / "rows")
    export_rows(layer, tmp_path / "rows")
    assert not left.is_symlink()
    assert (victim / "file").read_text() == "mine"


def test_it_needs_pyarrow(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ImportError, match=r"tfrs_embed\[parquet\]"):
        export_rows(make(), tmp_path / "rows")


def test_what_it_refuses(tmp_path):
    layer = make()
    with pytest.raises(
        ValueError, match="'large' of layer 'places' isn't built"
    ):
        export_rows(layer, tmp_path / "rows")
    layer.build(None)
    with pytest.raises(ValueError, match="no layer with tables"):
        export_rows(keras.layers.Dense(1), tmp_path / "rows")
    with pytest.raises(ValueError, match="exists: export rows to a new folder"):
        export_rows(layer, tmp_path)
    since = export_rows(layer, tmp_path / "first")
    for wrong, error, match in [
        (3, TypeError, "since must be what an earlier call returned, got int"),
        (
            {"places/small": None},
            ValueError,
            "since has no table 'places/large'",
        ),
        ({**since, "places/large": 99}, ValueError, "99"),
    ]:
        with pytest.raises(error, match=match):
            export_rows(layer, tmp_path / "rows", wrong)
    checkpoint = tf.train.Checkpoint(layer=layer)
    checkpoint.restore(checkpoint.write(str(tmp_path / "saved")))
    with pytest.raises(ValueError, match="'large' was restored"):
        export_rows(layer, tmp_path / "rows", since)
    assert not [*tmp_path.glob("rows*")]


def test_rows_whose_changes_are_not_known(tmp_path):
    layer = make()
    layer.build(None)
    tf.function(lambda: update(layer))()
    since = export_rows(layer, tmp_path / "first")
    assert since == {"places/large": None, "places/small": None}
    with pytest.raises(RuntimeError, match="a training step was traced before"):
        export_rows(layer, tmp_path / "second", since)


def test_a_failed_export_leaves_nothing(tmp_path, monkeypatch):
    layer = make()
    layer.build(None)
    first = export_rows(layer, tmp_path / "first")
    update(layer)
    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_batch", _full)
        with pytest.raises(OSError, match="no space left"):
            export_rows(layer, tmp_path / "second", first)
    assert [path.name for path in tmp_path.iterdir()] == ["first"]
    # What a killed one leaves is replaced.
    (tmp_path / "second.incomplete/places/other").mkdir(parents=True)
    export_rows(layer, tmp_path / "second", first)
    assert {p.name for p in (tmp_path / "second/places").iterdir()} == {
        "large",
        "small",
    }
    assert sorted(read(tmp_path / "second", "places", "large")[0]) == [3, 7]


def _full(*args, **kwargs):
    raise OSError("no space left")
