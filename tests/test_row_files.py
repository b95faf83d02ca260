"""Rows of tables as Parquet files."""

import shutil
import sys
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

import documentation
import tfrs_embed
from delta_checkpoints import Job
from keras_under_test import keras, layers
from process_tiers import on
from tfrs_embed import DynamicKeys, TimeToLive, kernels
from tfrs_embed.checkpoint import bundle
from tfrs_embed.serving import export_rows, import_rows, row_import
from training_helpers import state as state_of
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


def rows_of(layer, slots=False):
    """The rows of a layer's tables by key, with slots if asked for."""
    found = {}
    for name, table in layer.tables.items():
        keys = range(table.spec.vocabulary_size)
        if table.spec.keys is not None:
            keys = table.keys().tolist()
        parts = [table.table, *(table.slots.values() if slots else ())]
        values = [np.asarray(part.numpy(), np.float32) for part in parts]
        found[name] = {
            key: [value[place].tolist() for value in values]
            for place, key in enumerate(keys)
        }
    return found


@pytest.mark.parametrize("placement", ["one", "keys", "spill"])
def test_increments_make_the_rows_of_the_exporter(
    placement, tmp_path, both_implementations
):
    if placement == "spill" and kernels.operations("CPU:0") is None:
        pytest.skip("a spill needs the kernels")
    strategy = tf.distribute.get_strategy()
    job, other = (Job(strategy, placement) for _ in range(2))
    for each in (job, other):
        each.build()
    name, since = job.layer.name, None
    for number in range(4):
        folder = tmp_path / str(number)
        since = export_rows(job.layer, folder, since, slots=True)
        (folder / name).rename(folder / other.layer.name)
        import_rows(other.layer, folder, slots=True)
        assert rows_of(other.layer, True) == rows_of(job.layer, True)
        job.train()


@pytest.mark.parametrize("eviction", ["lfu", "score", TimeToLive(days=9)])
def test_a_table_with_its_counters_evicts_as_the_exporter(
    eviction, tmp_path, both_implementations
):
    def make_keyed():
        keys = DynamicKeys(eviction=eviction)
        table = tfrs_embed.TableConfig("t", 12, 4, keys=keys)
        feature = tfrs_embed.FeatureConfig("f", table)
        layer = layers.PartialTPUEmbedding(feature, "sgd", name="layer")
        layer.build(None)
        return layer, layer.tables["t"]

    def step(layer, keys):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant(keys, tf.int64)))
        tape.gradient(loss, layer.trainable_variables)

    days, rng = [1000], np.random.default_rng(0)
    clock = tfrs_embed.testing.simulated_clock(lambda: 86_400 * days[0])
    layer, table = make_keyed()
    other, imported = make_keyed()
    step(other, [3, 70, 70])
    since = None
    with clock:
        for number in range(4):
            for _ in range(3):
                step(layer, rng.integers(0, 30, 5))
                days[0] += 1
            if eviction == "score":
                keys = table.keys()
                table.score(keys[::2], rng.integers(-2, 3, len(keys[::2])))
            folder = tmp_path / str(number)
            since = export_rows(layer, folder, since, counters=True)
            if not isinstance(eviction, TimeToLive):
                before = state_of(other)
                with pytest.raises(ValueError, match="at most the layer's st"):
                    import_rows(other, folder, counters=True)
                assert state_of(other).keys() == before.keys()
                for name, value in state_of(other).items():
                    np.testing.assert_array_equal(value, before[name])
            other.step.assign(layer.step)
            if number == 0:
                imported.remove([3, 70])
            import_rows(other, folder, counters=True)
            for name, value in state_of(layer).items():
                found = state_of(other)[name]
                np.testing.assert_array_equal(found, value, name)
        for _ in range(9):
            keys = rng.integers(0, 30, 5)
            step(layer, keys), step(other, keys)
            assert imported.keys().tolist() == table.keys().tolist()


@pytest.mark.parametrize(
    ("eviction", "name", "values", "said"),
    [
        ("lru", "frequency", [1, -1], "'frequency' .* at least 0, and is -1"),
        ("lru", "last_used", [1.0, 2], "last_used' .* integers .* is double"),
        ("lru", "last_used", [None, 2], "integers and no nulls.* with 1 nulls"),
        ("lru", "last_used", None, "must have one column 'last_used'"),
        ("score", "score", [1.0, np.nan], "finite numbers .* nan at key 2"),
        ("score", "score", [1.0, 1e39], r"finite numbers .* 1e\+39 at key 2"),
        (
            TimeToLive(days=1),
            "last_used_time",
            [1, 10**18],
            "'last_used_time' .* more than a day after",
        ),
    ],
)
def test_counters_that_no_key_can_have(eviction, name, values, said, tmp_path):
    keys = DynamicKeys(eviction=eviction)
    table = tfrs_embed.TableConfig("t", 12, 4, keys=keys)
    feature = tfrs_embed.FeatureConfig("f", table)
    layer = layers.PartialTPUEmbedding(feature, "sgd")
    layer.build(None)
    before = state_of(layer)
    columns = {"key": [1, 2], "row": [[1.0] * 4] * 2, "frequency": [1, 1]}
    columns |= {"score": [1, 2], "last_used": [0, 0], "last_used_time": [0, 0]}
    columns |= {name: values}
    columns = {k: v for k, v in columns.items() if v is not None}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=f"a.parquet.*{said}"):
        import_rows(layer.tables["t"], tmp_path, counters=True)
    for part, value in state_of(layer).items():
        np.testing.assert_array_equal(value, before[part])


def test_slots_stay_without_slots(tmp_path):
    layer, other = make(), make()
    for each in (layer, other):
        each.build(None)
    update(layer)
    export_rows(layer, tmp_path / "rows")
    before = state_of(other)
    import_rows(other, tmp_path / "rows")
    assert rows_of(other) == rows_of(layer)
    after = state_of(other)
    for name in before:
        if not name.endswith("parameters"):
            np.testing.assert_array_equal(after[name], before[name])
    with pytest.raises(ValueError, match=r"one column 'accumulators'"):
        import_rows(other, tmp_path / "rows", slots=True)


def test_slots_with_one_number_a_row(tmp_path):
    optimizer = tfrs_embed.optimizers.RowWiseAdagrad(0.1)
    layer, other = (make(optimizer=optimizer) for _ in range(2))
    for each in (layer, other):
        each.build(None)
    update(layer)
    export_rows(layer, tmp_path / "rows", slots=True)
    import_rows(other, tmp_path / "rows", slots=True)
    assert rows_of(other, True) == rows_of(layer, True)


def keyed(dtype=tf.int64, rows=6, **options):
    """A layer of a table of keys, and the table."""
    keys = tfrs_embed.DynamicKeys(dtype, **options)
    table = tfrs_embed.TableConfig("items", rows, 2, keys=keys)
    layer = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("items", table), "adagrad", size_threshold=0
    )
    layer.build(None)
    return layer, layer.tables["items"]


VECTORS = [[1.0, 2.0], [3.0, 4.0]]


def write(path, keys, rows=VECTORS, **columns):
    """Writes a file as any producer would."""
    pq.write_table(pa.table({"key": keys, "row": rows, **columns}), str(path))
    return path


@pytest.mark.parametrize(
    ("dtype", "keys", "ids"),
    [
        (tf.int64, [-7, 10**15], [-7, 10**15]),
        (tf.int32, [5, -1], [5, -1]),
        (tf.uint64, pa.array([5, 2**64 - 1], pa.uint64()), [5, 2**64 - 1]),
        (tf.uint64, [5, -1], [5, 2**64 - 1]),
        (tf.string, ["red", "blue"], ["red", "blue"]),
        (tf.string, [b"red", b"\xff"], [b"red", b"\xff"]),
    ],
)
def test_files_of_any_producer(dtype, keys, ids, tmp_path):
    layer, table = keyed(dtype)
    where = write(tmp_path / "a.parquet", keys, seen=["x", None])
    import_rows(table, where)
    np.testing.assert_array_equal(
        layer(tf.constant(ids, dtype), training=False), VECTORS
    )
    assert table.size == 2


def test_fingerprints_are_keys_of_strings(tmp_path):
    _, table = keyed(tf.string)
    import_rows(table, write(tmp_path / "a.parquet", ["red", "blue"]))
    export_rows(table.layer(), tmp_path / "rows")
    other, copy = keyed(tf.string)
    import_rows(copy, tmp_path / "rows" / table.layer().name / "items")
    found = other(tf.constant(["red", "blue"]), training=False)
    np.testing.assert_array_equal(found, VECTORS)


@pytest.mark.parametrize(
    "kind", [pa.list_(pa.float64()), pa.large_list(pa.float16())]
)
def test_lists_of_any_floats_in_several_files(kind, tmp_path):
    layer, table = keyed()
    for number in range(2):
        rows = pa.array(
            [np.asarray(v, kind.value_type.to_pandas_dtype()) for v in VECTORS],
            kind,
        )
        write(
            tmp_path / f"{number}.parquet", [2 * number, 2 * number + 1], rows
        )
    (tmp_path / "_SUCCESS").write_text("")
    import_rows(table, tmp_path)
    found = layer(tf.range(4, dtype=tf.int64), training=False)
    np.testing.assert_array_equal(found, VECTORS * 2)
    import_rows(table, [tmp_path / "1.parquet"])
    assert table.size == 4


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"key": [1, 50]}, r"bad.*'large'.*from 0 to 49, got 50"),
        ({"key": [-1, 2]}, r"got -1"),
        ({"key": [3, 3]}, r"bad.*'large'.*got 3 again"),
        (
            {"key": [3, None]},
            r"bad.*'key' for table 'large'.*int64 with 1 nulls",
        ),
        ({"key": ["a", "b"]}, r"bad.*'large' must have integers.*is string"),
        (
            {"row": [[1.0] * 4, None]},
            r"bad.*'row' for table 'large'.*has 0 at key 2",
        ),
        ({"row": [[1.0] * 4, [1.0, None, 2, 3]]}, r"has nan at key 2"),
        ({"row": [[1.0] * 4, [1.0] * 3]}, r"have 4 numbers.*3 at key 2"),
        ({"row": [[1.0] * 4, [1.0, np.nan, 2, 3]]}, r"finite.*nan at key 2"),
        ({"row": [[1.0] * 4, [1e39] * 4]}, r"3.403e\+38, and has 1e\+39"),
        ({"row": [1.0, 2.0]}, r"'row'.*lists of numbers, and is double"),
        ({"row": [["a"] * 4] * 2}, r"lists of numbers, and is .*string"),
        ({"row": None}, r"must have one column 'row' for table 'large'"),
    ],
)
def test_wrong_files_change_nothing(columns, said, tmp_path):
    layer = make()
    layer.build(None)
    before = state_of(layer)
    good = {"key": [1, 2], "row": [[1.0] * 4] * 2}
    columns = {k: v for k, v in {**good, **columns}.items() if v is not None}
    pq.write_table(pa.table(good | {"key": [8, 9]}), tmp_path / "a.parquet")
    pq.write_table(pa.table(columns), tmp_path / "bad.parquet")
    with pytest.raises(ValueError, match=said):
        import_rows(layer.tables["large"], tmp_path)
    for name, value in state_of(layer).items():
        np.testing.assert_array_equal(value, before[name])


def test_keys_without_room_change_nothing(tmp_path):
    layer, table = keyed(rows=3)
    table.assign([1, 2], VECTORS)
    before = state_of(layer)
    where = write(tmp_path / "a.parquet", [2, 3, 4], [[0.0, 1.0]] * 3)
    with pytest.raises(ValueError, match=r"a.parquet.*'items'.*no room for 4"):
        import_rows(table, where)
    for name, value in state_of(layer).items():
        np.testing.assert_array_equal(value, before[name])
    # Removed keys make room.
    name = tmp_path / "_removed-00000.parquet"
    pq.write_table(pa.table({"key": pa.array([1, 77])}), str(name))
    import_rows(table, tmp_path)
    assert table.keys().tolist() == [2, 3, 4]
    assert rows_of(layer)["items"][3] == [[0.0, 1.0]]


@pytest.mark.parametrize(
    ("dtype", "keys", "said"),
    [
        (tf.int32, [1, 2**31], r"'items'.*to 2147483647, got 2147483648"),
        (
            tf.int64,
            pa.array([1, 2**63], pa.uint64()),
            "got 9223372036854775808",
        ),
        (tf.int64, ["a", "b"], r"'items' must have integers"),
        (tf.string, [1.0, 2.0], r"strings, or int64"),
        (tf.string, ["a", ""], r"a.parquet.*'items': key number 1 is an empty"),
    ],
)
def test_wrong_keys(dtype, keys, said, tmp_path):
    _, table = keyed(dtype)
    where = write(tmp_path / "a.parquet", keys)
    with pytest.raises(ValueError, match=said):
        import_rows(table, where)
    assert table.size == 0


def test_what_import_refuses(tmp_path):
    layer = make()
    with pytest.raises(ValueError, match="'large' isn't made yet"):
        import_rows(layer.tables["large"], tmp_path)
    layer.build(None)
    export_rows(layer, tmp_path / "rows")
    with pytest.raises(TypeError, match="of a model are in one folder"):
        import_rows(layer, ["a"])
    with pytest.raises(ValueError, match="is no folder"):
        import_rows(layer, tmp_path / "none")
    with pytest.raises(ValueError, match=r"none.parquet' can't be read"):
        import_rows(layer.tables["large"], tmp_path / "none.parquet")
    with pytest.raises(ValueError, match="an empty list"):
        import_rows(layer.tables["large"], [])
    with pytest.raises(ValueError, match="no Parquet files"):
        import_rows(layer.tables["large"], tmp_path / "rows")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no rows that export_rows wrote"):
        import_rows(layer, tmp_path / "empty")
    for name in ("places", "other"):
        shutil.copytree(tmp_path / "rows", tmp_path / name)
    (tmp_path / "places/places").rename(tmp_path / "places/other")
    (tmp_path / "other/places/large").rename(tmp_path / "other/places/odd")
    before = state_of(layer)
    for name, said in (("places", "'other/large'"), ("other", "'places/odd'")):
        with pytest.raises(ValueError, match=f"{said}, and the model has"):
            import_rows(layer, tmp_path / name)
    broken = tmp_path / "rows/places/small/part-00000.parquet"
    broken.write_bytes(broken.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"small.*can't be read"):
        import_rows(layer, tmp_path / "rows")
    for name, value in state_of(layer).items():
        np.testing.assert_array_equal(value, before[name])
    removed = tmp_path / "_removed-00000.parquet"
    pq.write_table(pa.table({"key": [1]}), str(removed))
    write(tmp_path / "a.parquet", [1, 2], [[1.0] * 4] * 2)
    with pytest.raises(ValueError, match="'large' has no DynamicKeys"):
        import_rows(layer.tables["large"], tmp_path)
    with pytest.raises(RuntimeError, match="between steps"):
        tf.function(lambda: import_rows(layer, tmp_path / "rows"))()


def test_a_table_of_hashed_ids_is_imported_by_row(tmp_path):
    table = tfrs_embed.TableConfig("t", ROWS, 4)
    feature = tfrs_embed.FeatureConfig("f", table, hashing=tfrs_embed.Hash())
    layer = layers.PartialTPUEmbedding(feature, "sgd", name="places")
    layer.build(None)
    where = write(tmp_path / "a.parquet", [1, 2], [[1.0] * 4] * 2)
    with pytest.raises(ValueError, match=r"hashing.*import_rows\(layer"):
        import_rows(layer.tables["t"], where)
    export_rows(layer, tmp_path / "rows")
    before = state_of(layer)
    layer.tables["t"].variables["parameters"].assign(np.zeros([ROWS, 4]))
    import_rows(layer, tmp_path / "rows")
    for name, value in state_of(layer).items():
        np.testing.assert_array_equal(value, before[name])


def test_files_that_unpack_to_too_much_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(row_import, "_UNPACKED_BYTES", 1000)
    _, table = keyed()
    where = write(tmp_path / "a.parquet", [7] * 30_000, VECTORS * 15_000)
    with pytest.raises(ValueError, match=r"a.parquet.*'items'.*unpack to"):
        import_rows(table, where)


def test_rows_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 160)
    layer, table = keyed(rows=100)
    where = write(tmp_path / "a.parquet", [*range(100)], VECTORS * 50)
    sizes, check = [], row_import._Import._keys
    monkeypatch.setattr(
        row_import._Import,
        "_keys",
        lambda *args: sizes.append(len(args[-1])) or check(*args),
    )
    import_rows(table, where)
    assert sizes == [10] * 20  # The file is read two times.
    found = layer(tf.range(100, dtype=tf.int64), training=False)
    np.testing.assert_array_equal(found, VECTORS * 50)


@pytest.mark.parametrize(
    "names",
    [
        ("tfra/movie_mht_1of2-{}", "tfra/movie_mht_2of2-{}", "keys", "values"),
        (
            "dynamicemb/movie_emb_{}.rank_0.world_size_2",
            "dynamicemb/movie_emb_{}.rank_1.world_size_2",
            *("keys", "values"),
        ),
    ],
)
def test_recipes_of_dumps(names, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _, table = keyed(rows=100)
    expected = {}
    *paths, keys, values = names
    for number, path in enumerate(paths):
        # As both write them: numbers of the machine's order, without a header.
        ids = np.arange(30, dtype=np.int64) * 10**15 + number
        rows = np.arange(60, dtype=np.float32).reshape(30, 2) * (number + 1)
        expected.update(zip(ids.tolist(), rows.tolist(), strict=True))
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path.format(keys)).write_bytes(ids.tobytes())
        (tmp_path / path.format(values)).write_bytes(rows.tobytes())
    found = {"layer": types.SimpleNamespace(tables={"movie": table})}
    for block in documentation.blocks("docs/serving.md"):
        if "assign_dump(" in block.code:
            block.run(found)
    assert table.keys().tolist() == sorted(expected)
    np.testing.assert_array_equal(
        table.table.numpy(), [expected[key] for key in sorted(expected)]
    )
