"""Tables that are moving averages of another layer's."""

import numpy as np
import pytest
import tensorflow as tf

from keras_under_test import layers
from layers_by_place import (
    DIM,
    PLACES,
    ROWS,
    make,
    options_of,
)
from process_tiers import on, without_kernels
from tfrs_embed import DynamicKeys, FeatureConfig, TableConfig
from training_helpers import state

pytestmark = on("keras:3", tier="more")

AVERAGED = [place for place in PLACES if place != "bfloat16"]


@on("mirrored:2", "workers:2", tier="nightly")
@on("mirrored:2", tier="more")
@on("workers:2", tier="more", when=lambda place: place in ("row", "hot"))
@pytest.mark.parametrize(
    ("place", "other"),
    [*((p, p) for p in AVERAGED), ("row", "column"), ("keras", "hot")],
)
def test_rows_are_averages_and_slots_stay(strategy, place, other, files_folder):
    pair = [
        make(strategy, f"layer_{i}", **options_of(each, files_folder / str(i)))
        for i, each in enumerate((place, other))
    ]
    average, layer = pair
    expected = state(average)
    wide = expected["t/parameters"].astype(np.float64)
    rng = np.random.default_rng(0)
    for _ in range(20):
        values = rng.normal(size=(ROWS, DIM)).astype(np.float32)
        layer.load_tables({"t": values})
        average.assign_moving_average(layer, 0.9)
        wide = 0.9 * wide + 0.1 * values
    found = state(average)
    np.testing.assert_allclose(found.pop("t/parameters"), wide, atol=1e-6)
    for name, value in found.items():
        np.testing.assert_array_equal(value, expected[name])
    np.testing.assert_array_equal(state(layer)["t/parameters"], values)
    if place == "hot":  # Lookups read the copies.
        ids = tf.constant([3, 20, 5])
        run = tf.function(
            lambda: strategy.run(
                lambda: average({"f": ids}, training=False)["f"]
            )
        )
        for rows in strategy.experimental_local_results(run()):
            np.testing.assert_allclose(rows, wide[[3, 20, 5]], atol=1e-6)


@on("mirrored:2", "workers:2", tier="nightly")
@on(
    "mirrored:2",
    "workers:2",
    tier="more",
    when=lambda each_implementation: not without_kernels(each_implementation),
)
@pytest.mark.usefixtures("each_implementation")
def test_keys_follow(strategy):
    average, layer = (
        make(strategy, name, keys=DynamicKeys()) for name in ("a", "b")
    )
    average.tables["t"].assign([1, 2, 3], np.full([3, DIM], 1.0))
    layer.tables["t"].assign([2, 3, 10**12], np.full([3, DIM], 3.0))
    average.assign_moving_average(layer, 0.75)
    assert average.tables["t"].keys().tolist() == [2, 3, 10**12]
    np.testing.assert_array_equal(
        state(average)["t/parameters"][:, 0], [1.5, 1.5, 3.0]
    )


def test_changes_are_tracked():
    pair = [make(tf.distribute.get_strategy(), name) for name in ("a", "b")]
    table = pair[0].tables["t"]
    table.track_changes()
    before = table.moment()
    pair[0].assign_moving_average(pair[1], 0.5)
    assert len(table.changed(since=before).rows) == ROWS


def test_what_is_refused():
    strategy = tf.distribute.get_strategy()
    layer = make(strategy, "a")
    for rate in (-0.1, 1.5):
        with pytest.raises(ValueError, match=r"'a': rate must be in \[0, 1\]"):
            layer.assign_moving_average(layer, rate)
    with pytest.raises(TypeError, match="'a': rate"):
        layer.assign_moving_average(layer, "0.9")
    halves = make(strategy, "b", dtype="bfloat16")
    with pytest.raises(ValueError, match=r"'t': rows of bfloat16"):
        halves.assign_moving_average(layer, 0.9)
    layer.assign_moving_average(halves, 0.9)
    other = layers.PartialTPUEmbedding(
        FeatureConfig("f", TableConfig("u", ROWS, DIM)), "sgd"
    )
    with pytest.raises(ValueError, match=r"has the tables \['t'\].*\['u'\]"):
        layer.assign_moving_average(other, 0.9)
    keyed = make(strategy, "c", keys=DynamicKeys())
    with pytest.raises(ValueError, match="'t': the other table has another"):
        layer.assign_moving_average(keyed, 0.9)
    small = TableConfig("t", 2, DIM, keys=DynamicKeys())
    full = layers.PartialTPUEmbedding(FeatureConfig("f", small), "sgd")
    full.build(None)
    keyed.tables["t"].assign([1, 2, 3], np.zeros([3, DIM]))
    full.tables["t"].assign([9], np.ones([1, DIM]))
    with pytest.raises(ValueError, match="'t'"):
        full.assign_moving_average(keyed, 0.9)
    assert full.tables["t"].keys().tolist() == [9]
