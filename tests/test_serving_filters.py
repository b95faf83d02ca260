"""Exports and deltas of the keys that matter."""

import datetime

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from filtered_models import DIM, LIMITS, SPEC, Stream
from keras_under_test import layers
from process_tiers import nightly, on
from tfrs_embed.checkpoint import bundle
from tfrs_embed.serving import export, export_delta

pytestmark = [pytest.mark.tools, on("keras:3", tier="nightly")]

ASKED = np.arange(120)
TIME_TO_LIVE = tfrs_embed.TimeToLive(3)


@nightly(
    lambda eviction, each_implementation: (
        (eviction, each_implementation)
        not in {("lfu", "kernels"), (None, "tensorflow")}
    )
)
@pytest.mark.parametrize("eviction", ["lru", "lfu", None, TIME_TO_LIVE])
@pytest.mark.usefixtures("each_implementation")
def test_an_export_has_the_keys_that_fulfil_all_limits(
    strategy, tmp_path, monkeypatch, eviction
):
    monkeypatch.setattr(bundle, "BLOCK_BYTES", 5 * 4 * DIM)
    stream = Stream(strategy, eviction)
    stream.train(0, 100, steps=8)
    options = {}
    for number, limits in enumerate(LIMITS):
        chosen, path = stream.expected(**limits), tmp_path / f"{number}"
        given = limits
        if number % 2:
            options = {"updatable": True, "mapped": True}
            given = {n: {"layer/items": limit} for n, limit in limits.items()}
        stream.export(path, **options, **given)
        stream.assert_serves(path, chosen, ASKED)
        if not options:  # They are left out of the files, too.
            reader = tf.train.load_checkpoint(f"{path}/variables/variables")
            names = reader.get_variable_to_shape_map()
            [keys] = [name for name in names if "/items/keys" in name]
            assert reader.get_tensor(keys).tolist() == chosen


def test_keys_in_a_spill_are_chosen_as_others(
    strategy, tmp_path, needs_kernels
):
    spill = tfrs_embed.FileStorage(str(tmp_path / "spill"))
    stream = Stream(strategy, "lru", rows=16, spill=spill)
    stream.train(0, 100, steps=8)
    chosen = stream.expected(min_frequency=2)
    assert len(chosen) > 16
    stream.export(tmp_path / "model", min_frequency=2)
    stream.assert_serves(tmp_path / "model", chosen, ASKED)


@nightly(lambda limits, each_implementation: len(limits) == 1)
@pytest.mark.parametrize(
    "limits",
    [
        {"min_frequency": 2},
        {"max_age": 1},
        {"max_keys": 9},
        {"min_frequency": 2, "max_age": 3, "max_keys": 6},
    ],
)
@pytest.mark.usefixtures("each_implementation")
def test_base_and_deltas_equal_an_export(strategy, tmp_path, limits):
    stream = Stream(strategy, "lfu", rows=24)
    stream.train(0, 40)
    base = tmp_path / "base"
    stream.export(base, updatable=True, **limits)
    served, since, had = tf.saved_model.load(str(base)), base, set()
    came = gone = 0
    for number in range(1, 7):
        low = 10 * (number % 3)
        stream.train(low, low + 40)
        if number == 3:  # Older keys rise again: none is used.
            removed = stream.table.keys()[::2]
            stream.table.remove(removed)
        stream.read_uses()
        chosen = stream.expected(**limits)
        came += len(set(chosen) - had)
        gone += len(had - set(chosen))
        had = set(chosen)
        delta = tmp_path / f"delta-{number}"
        assert export_delta(stream.layer, delta, since=since) == number
        served.apply_delta(str(delta))
        stream.assert_serves(served, chosen, ASKED)
        fresh = tmp_path / f"fresh-{number}"
        stream.export(fresh, **limits)
        for mine, theirs in zip(
            stream.answers(served, ASKED).values(),
            stream.answers(fresh, ASKED).values(),
            strict=True,
        ):
            np.testing.assert_array_equal(mine, theirs)
        since = delta
    assert came and gone


def keys_of(delta, name="keys"):
    """The keys that a delta has, or "removed" ones."""
    reader = tf.train.load_checkpoint(str(delta))
    return reader.get_tensor(f"tables/layer/items/{name}").tolist()


def test_a_delta_has_the_keys_that_come_and_go_and_changed_alone(
    strategy, tmp_path
):
    stream = Stream(strategy, None)

    def train(*keys):
        stream._run(tf.constant([*keys, *keys], tf.int64))

    for keys in ([1, 2], [1, 2], [3, 4]):
        train(*keys)
    stream.export(tmp_path / "base", updatable=True, max_keys={"items": 2})
    train(3, 5)
    export_delta(stream.layer, tmp_path / "1", since=tmp_path / "base")
    # All keys of the base were in two steps or in the last one.
    assert keys_of(tmp_path / "1") == [3, 5]
    assert keys_of(tmp_path / "1", "removed") == [4]
    stream.table.remove(tf.constant([5, 3], tf.int64))
    export_delta(stream.layer, tmp_path / "2", since=tmp_path / "1")
    # 4 comes back, and 2 comes: their rows haven't changed since.
    assert keys_of(tmp_path / "2") == [2, 4]
    assert keys_of(tmp_path / "2", "removed") == [3, 5]
    export_delta(stream.layer, tmp_path / "3", since=tmp_path / "2")
    assert keys_of(tmp_path / "3") == keys_of(tmp_path / "3", "removed") == []


def test_a_delta_on_an_earlier_model_has_all_that_it_may_lack(
    strategy, tmp_path
):
    limits = {"max_keys": 8, "max_age": 3}
    stream = Stream(strategy, "lru", rows=36)
    stream.train(0, 50)
    bases = [tmp_path / "first", tmp_path / "second"]
    for base in bases:
        stream.export(base, updatable=True, **limits)
        stream.train(10, 60, steps=2)
    # Of the first base, whose keys are forgotten; and of it again.
    for number, (base, path) in enumerate(
        [(bases[0], "a"), (bases[1], "b"), (bases[0], "c")]
    ):
        stream.train(number, 60, steps=1)
        stream.read_uses()
        export_delta(stream.layer, tmp_path / path, since=base)
        served = tf.saved_model.load(str(base))
        served.apply_delta(str(tmp_path / path))
        stream.assert_serves(served, stream.expected(**limits), ASKED)


@pytest.mark.parametrize(
    "limits, match",
    [
        ({"min_frequency": 0}, "min_frequency must be an integer >= 1, got 0"),
        ({"max_age": -1}, "max_age must be an integer >= 0, got -1"),
        ({"max_keys": True}, "max_keys must be an integer >= 1, got True"),
        ({"max_keys": 2.5}, "max_keys must be an integer >= 1, got 2.5"),
        (
            {"max_keys": {"items": 0}},
            "max_keys of table 'items' must be an integer >= 1, got 0",
        ),
        (
            {"max_age": {"item": 3}},
            r"max_age: .* no table 'item' .* are \['layer/items'\]",
        ),
        (
            {"max_age": {"movie": 3}},
            "Table 'movie' of layer 'layer' .* max_age=3: it has no Dynamic",
        ),
        (
            {"max_keys": {"items": 3, "layer/items": 4}},
            "max_keys has two limits .* 'items' and 'layer/items'",
        ),
    ],
)
def test_limits_that_fit_no_table_are_refused(
    strategy, tmp_path, limits, match
):
    stream = Stream(strategy, "lru")
    stream.train(0, 30)
    with pytest.raises(ValueError, match=match):
        stream.export(tmp_path / "model", **limits)
    with pytest.raises(TypeError, match="a table's name in max_age must be"):
        stream.export(tmp_path / "model", max_age={3: 3})
    assert list(tmp_path.iterdir()) == []


def test_tables_with_scores_have_ages_and_best_keys_but_no_frequency(tmp_path):
    stream = Stream(tf.distribute.get_strategy(), "score")
    for keys in ([3, 5, 7, 8], [5, 7, 8, 9]):
        stream._run(tf.constant(keys, tf.int64))
    stream.table.score([3, 5, 8], [9, -1, 2])
    stream.export(tmp_path / "model", max_age=0, max_keys=2)
    stream.assert_serves(tmp_path / "model", [8, 9], ASKED)
    for limits in ({"min_frequency": 1}, {"min_frequency": {"items": 2}}):
        match = "Table 'items' .* min_frequency=.: with eviction='score' it has"
        with pytest.raises(ValueError, match=match):
            stream.export(tmp_path / "other", **limits)


def test_tables_that_count_in_time_have_ages_in_time(tmp_path):
    days = tfrs_embed.TimeToLive(days=30)
    stream = Stream(tf.distribute.get_strategy(), days, fallback_rows=4)
    now = 86_400.0
    with tfrs_embed.testing.simulated_clock(lambda: now):
        for keys in ([3, 5], [5, 7], [11]):
            stream._run(tf.constant(keys, tf.int64))
            now += 86_400
        age = datetime.timedelta(days=2)
        stream.export(tmp_path / "model", max_age=age)
        reader = tf.train.load_checkpoint(
            str(tmp_path / "model" / "variables" / "variables")
        )
        names = reader.get_variable_to_shape_map()
        [keys] = [name for name in names if "/items/keys" in name]
        # The last use of 3 is three days ago.
        assert reader.get_tensor(keys).tolist() == [5, 7, 11]
        # It has its shared row, as in a table without it.
        stream.table.remove(tf.constant([3], tf.int64))
        served = tf.saved_model.load(str(tmp_path / "model"))
        asked = {n: tf.constant([3, 5, 7, 11]) for n in ("items", "movie")}
        asked = {n: tf.cast(ids, tf.int64) for n, ids in asked.items()}
        for name, vectors in stream.layer(asked, training=False).items():
            np.testing.assert_array_equal(served.serve(asked)[name], vectors)
        for limit, match in [
            (3, r"layer' .*max_age=3: .* in time. Give a datetime.timedelta"),
            (-age, r"max_age must be at least 0, got datetime"),
        ]:
            with pytest.raises(ValueError, match=match):
                stream.export(tmp_path / "other", max_age=limit)
    steps = Stream(tf.distribute.get_strategy(), "lru")
    with pytest.raises(ValueError, match=r"in steps\. Give an integer"):
        steps.export(tmp_path / "other", max_age=age)
    assert not (tmp_path / "other").exists()


def test_tables_that_count_nothing_have_no_limits(tmp_path):
    layer = layers.All2AllDenseEmbedding(
        20, 3, 1, 2, use_hashtable=True, name="keyed"
    )
    layer(tf.constant([[[3, 11]], [[3, 5]]], tf.int64), training=True)
    spec = tf.TensorSpec([None, 1, 2], tf.int64)
    with pytest.raises(ValueError, match=r"'table' of layer 'keyed' .* count"):
        export(layer, tmp_path / "model", spec, max_keys=2)
    table = tfrs_embed.TableConfig("movie", 30, 3)
    static = layers.PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("movie", table), "sgd"
    )
    static(tf.constant([1], tf.int64))
    with pytest.raises(ValueError, match="max_keys=2 is for tables with Dyn"):
        export(static, tmp_path / "model", SPEC, max_keys=2)
    assert list(tmp_path.iterdir()) == []
