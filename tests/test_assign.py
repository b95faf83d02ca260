"""Vectors that are assigned to some ids of a table."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import layers
from layers_by_place import (
    DIM,
    PLACES,
    ROWS,
    make,
    options_of,
)
from process_tiers import nightly, on, without_kernels
from tfrs_embed import DynamicKeys, FeatureConfig, TableConfig
from training_helpers import differentiate, state

pytestmark = on("keras:3", tier="more")

IDS = np.array([7, 3, 49])
FULL = np.zeros([ROWS, DIM], np.float32)
VECTORS = np.arange(12, dtype=np.float32).reshape(3, 4)


def train(layer, ids):
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer({"f": tf.constant(ids)})["f"])
    differentiate(tape, loss, layer.trainable_variables)


@on("mirrored:2", "workers:2", tier="nightly")
@on("mirrored:2", tier="more")
@on("workers:2", tier="more", when=lambda place: place in ("row", "hot"))
@pytest.mark.parametrize("place", PLACES)
def test_others_and_slots_stay(strategy, place, files_folder):
    layer = make(strategy, **options_of(place, files_folder))
    before = state(layer)
    layer.tables["t"].assign(IDS, VECTORS)
    after = state(layer)
    rows = before["t/parameters"].copy()
    rows[IDS] = VECTORS.astype(rows.dtype)
    np.testing.assert_array_equal(after["t/parameters"], rows)
    for name in before.keys() - {"t/parameters"}:
        np.testing.assert_array_equal(after[name], before[name])
    if place == "hot":  # Lookups read the copies.
        ids = tf.constant(IDS)
        run = tf.function(
            lambda: strategy.run(lambda: layer({"f": ids}, training=False)["f"])
        )
        for found in strategy.experimental_local_results(run()):
            np.testing.assert_array_equal(found, VECTORS)


def test_changes_are_tracked():
    layer = make(tf.distribute.get_strategy())
    table = layer.tables["t"]
    table.track_changes()
    before = table.moment()
    table.assign(IDS, VECTORS)
    assert table.changed(since=before).rows.tolist() == [3, 7, 49]


@nightly(
    lambda each_implementation, options: (
        without_kernels(each_implementation) and not options
    )
)
@on("mirrored:2", "workers:2", tier="nightly")
@on(
    "mirrored:2",
    "workers:2",
    tier="more",
    when=lambda each_implementation: not without_kernels(each_implementation),
)
@pytest.mark.usefixtures("each_implementation")
@pytest.mark.parametrize("options", [{}, {"admission": 3}, {"evict": True}])
def test_keys_without_rows_get_them(strategy, options):
    keys = DynamicKeys()
    if "admission" in options:
        keys = DynamicKeys(
            admission=tfrs_embed.FrequencyAdmission(options["admission"])
        )
    if "evict" in options:
        keys = DynamicKeys(eviction="lru")
    layer = make(strategy, keys=keys)
    table = layer.tables["t"]
    table.give_rows([7, 10**12])
    before = state(layer)
    table.assign([10**15, 7, -4], VECTORS)
    assert table.keys().tolist() == [-4, 7, 10**12, 10**15]
    after = state(layer)
    rows = after["t/parameters"]
    np.testing.assert_array_equal(rows[[3, 1, 0]], VECTORS)
    np.testing.assert_array_equal(rows[2], before["t/parameters"][1])
    np.testing.assert_array_equal(
        after["t/accumulators"][[1, 2]], before["t/accumulators"]
    )
    # In parts, some of which are there; none of another call are lost.
    table.assign([1, 2, 7], VECTORS)
    assert table.size == 6
    np.testing.assert_array_equal(
        table.variables["parameters"].numpy()[3], VECTORS[2]
    )


def test_strings_and_trained_keys():
    layer = make(tf.distribute.get_strategy(), keys=DynamicKeys(tf.string))
    train(layer, ["a", "b"])
    before = layer({"f": tf.constant(["b"])}, training=False)["f"]
    layer.tables["t"].assign(tf.constant(["c", "a", "d"]), VECTORS)
    found = layer({"f": tf.constant(["c", "a", "d", "b"])}, training=False)
    np.testing.assert_array_equal(found["f"][:3], VECTORS)
    np.testing.assert_array_equal(found["f"][3:], before)
    train(layer, ["a", "c", "e"])
    assert layer.tables["t"].size == 5


def test_no_room_changes_nothing():
    layer = make(tf.distribute.get_strategy(), keys=DynamicKeys())
    table = layer.tables["t"]
    table.give_rows(np.arange(ROWS - 1))
    before = state(layer)
    with pytest.raises(ValueError, match="'t'"):
        table.assign([100, 101, 102], VECTORS)
    after = state(layer)
    for name, value in before.items():
        np.testing.assert_array_equal(after[name], value)


@pytest.mark.parametrize(
    ("ids", "vectors", "kind", "said"),
    [
        ([3, 50], VECTORS[:2], ValueError, r"'t'.*from 0 to 49, got id 50"),
        ([3, -1], VECTORS[:2], ValueError, r"'t'.*got id -1"),
        ([3, 3], VECTORS[:2], ValueError, r"'t': each id .*got 3 2 times"),
        ([[3]], VECTORS[:1], ValueError, r"'t': ids must be \[n\]"),
        ([3.5], VECTORS[:1], TypeError, r"'t': ids must be integers"),
        ([3], VECTORS, ValueError, r"'t': vectors of 1 ids .*\[1, 4\]"),
        ([3], [["a"] * 4], TypeError, r"'t': vectors must be numbers"),
    ],
)
def test_wrong_arguments_change_nothing(ids, vectors, kind, said):
    layer = make(tf.distribute.get_strategy())
    before = state(layer)
    with pytest.raises(kind, match=said):
        layer.tables["t"].assign(ids, vectors)
    for name, value in state(layer).items():
        np.testing.assert_array_equal(value, before[name])


def test_hashed_ids_and_functions_are_refused():
    table = TableConfig("t", ROWS, DIM)
    feature = FeatureConfig("f", table, hashing=tfrs_embed.Hash())
    layer = layers.PartialTPUEmbedding(feature, "sgd")
    with pytest.raises(ValueError, match="isn't made yet"):
        layer.tables["t"].assign([1], VECTORS[:1])
    layer.build(None)
    with pytest.raises(ValueError, match="hashing"):
        layer.tables["t"].assign([1], VECTORS[:1])
    layer = make(tf.distribute.get_strategy())
    with pytest.raises(RuntimeError, match="between steps"):
        tf.function(lambda: layer.tables["t"].assign([1], VECTORS[:1]))()


@on("mirrored:2", "workers:2", tier="nightly")
@on("mirrored:2", tier="more")
@on("workers:2", tier="more", when=lambda place: place in ("row", "column"))
@pytest.mark.parametrize("place", ["row", "keras", "column", "files"])
def test_rows_and_slots_move_to_another_order(strategy, place, files_folder):
    layer = make(strategy, **options_of(place, files_folder))
    old = make(strategy)
    for key, value in state(old).items():
        if key != "step":
            name = key.split("/")[1]
            values = np.arange(value.size, dtype=value.dtype)
            old.tables["t"].variables[name].assign(values.reshape(value.shape))
    before, given = state(layer), state(old)
    rows = np.random.default_rng(0).permutation(ROWS)
    rows[[4, 20]] = -1
    layer.load_tables({"t": old.tables["t"]}, rows={"t": rows})
    for name, value in state(layer).items():
        expected = before[name]
        if name != "step":
            expected = np.where(
                (rows >= 0)[:, None], given[name][rows], expected
            )
        np.testing.assert_array_equal(value, expected, err_msg=name)


def test_a_table_is_sorted_anew_in_its_place():
    layer = make(tf.distribute.get_strategy())
    train(layer, [3, 7])
    before = state(layer)
    rows = np.arange(ROWS)[::-1]
    layer.load_tables({"t": layer.tables["t"]}, rows={"t": rows})
    for name in ("t/parameters", "t/accumulators"):
        np.testing.assert_array_equal(state(layer)[name], before[name][rows])


@pytest.mark.parametrize(
    ("tables", "rows", "said"),
    [
        ({}, {"t": range(ROWS)}, r"'t': rows without values"),
        ({"t": FULL}, {"u": [0]}, r"no table 'u'"),
        ({"t": VECTORS}, {"t": [0, 1]}, r"'t': rows must be 50 integers"),
        ({"t": VECTORS}, {"t": [3] * ROWS}, r"'t': rows must be from -1 to 2"),
        ({"t": VECTORS}, {"t": [-2] * ROWS}, r"'t': .*got -2"),
        ({"t": VECTORS[:, :3]}, {"t": [0] * ROWS}, r"'t' has the shape"),
        ({"t": VECTORS}, {}, r"'t' has the shape"),
    ],
)
def test_wrong_rows_change_nothing(tables, rows, said):
    layer = make(tf.distribute.get_strategy())
    before = state(layer)
    with pytest.raises(ValueError, match=said):
        layer.load_tables(tables, rows=rows)
    for name, value in state(layer).items():
        np.testing.assert_array_equal(value, before[name])
