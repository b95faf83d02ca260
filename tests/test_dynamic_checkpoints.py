"""Saving, restoring and exporting tables with `DynamicKeys`."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from dynamic_layers import TableCase, Tables, normal
from dynamic_layers import train as train_to
from keras_under_test import keras, layers, of_keras_2
from process_tiers import nightly, on, without_kernels
from reference import Feature
from tfrs_embed import DynamicKeys, FrequencyAdmission, TimeToLive, checkpoint
from tfrs_embed.serving import export
from training_helpers import assert_same, differentiate, state

pytestmark = on("keras:3", tier="nightly")

SUFFIX = "/.ATTRIBUTES/VARIABLE_VALUE"
DIM = 2
SEED = 3


def initializer():
    return keras.initializers.RandomNormal(seed=SEED)


def make(rows=8, optimizer="adagrad", keys=None, name="ids", **options):
    """A layer with one table; `keys` False: a static one."""
    if keys is None:
        keys = DynamicKeys(admission=FrequencyAdmission(2))
    table = tfrs_embed.TableConfig(
        name, rows, DIM, initializer(), keys=keys or None
    )
    feature = tfrs_embed.FeatureConfig("f", table)
    options.setdefault("size_threshold", 0)
    return layers.PartialTPUEmbedding({"f": feature}, optimizer, **options)


def train(layer, *steps):
    for keys in steps:
        with tf.GradientTape() as tape:
            vectors = layer({"f": tf.constant(keys)}, training=True)["f"]
            loss = tf.reduce_sum((vectors - 1) ** 2)
        differentiate(tape, loss, layer.trainable_variables)
    return layer


def trained(**options):
    """Keys 1, 2, 5, -7 with rows, 4 and 9 without."""
    layer = make(**options)
    return train(layer, [1, 1, 2], [5, 2, 5, 5], [-7, 9, -7, 4], [2])


def save(layer, folder):
    return tf.train.Checkpoint(layer=layer).save(str(folder / "checkpoint"))


def restore(layer, path):
    return tf.train.Checkpoint(layer=layer).restore(path)


def tables_of(layer):
    """The state but for the step, which is a variable of TensorFlow's own."""
    found = state(layer)
    del found["step"]
    return found


BUILT = pytest.mark.parametrize("built", [False, True], ids=["later", "built"])


def prepare(layer, built):
    """Trains on other keys, to be replaced, or leaves the layer unbuilt."""
    if built:
        train(layer, [70, 70, 5, 80, 5, 6], [5, 5])
    return layer


@pytest.mark.usefixtures("both_implementations")
class TestCheckpoints:
    @BUILT
    def test_round_trip(self, tmp_path, built):
        layer = trained()
        saved = state(layer)
        path = save(layer, tmp_path)
        other = prepare(make(), built)
        status = restore(other, path)
        other.build(None)
        status.assert_consumed()
        assert_same(state(other), saved)
        np.testing.assert_array_equal(saved["ids/keys"], [-7, 1, 2, 5])
        np.testing.assert_array_equal(saved["ids/frequency"], [2, 2, 3, 3])
        np.testing.assert_array_equal(saved["ids/last_used"], [3, 1, 4, 2])
        np.testing.assert_array_equal(
            saved["ids/candidates"], [[4, 1, 3], [9, 1, 3]]
        )
        # They go on alike: keys without rows are still remembered.
        for each in (layer, other):
            train(each, [4, 5, 11], [9, 12, 12])
        assert_same(state(other), state(layer))
        assert other.tables["ids"].lookup([4]) >= 0

    def test_contents(self, tmp_path):
        layer = trained()
        reader = tf.train.load_checkpoint(save(layer, tmp_path))
        order = np.argsort(reader.get_tensor(f"layer/tables/ids/keys{SUFFIX}"))
        for name, value in state(layer).items():
            key = "step" if name == "step" else f"tables/{name}"
            found = reader.get_tensor(f"layer/{key}{SUFFIX}")
            if name == "ids/candidates":
                found = found[np.argsort(found[:, 0])]
            elif name != "step":
                found = found[order]
            np.testing.assert_array_equal(found, value, name)

    @BUILT
    def test_no_keys(self, tmp_path, built):
        layer = make()
        layer.build(None)
        path = save(layer, tmp_path)
        other = prepare(make(), built)
        restore(other, path)
        other.build(None)
        assert_same(state(other), state(layer))
        assert other.tables["ids"].size == 0

    @nightly(without_kernels)
    @BUILT
    @pytest.mark.parametrize("rows", [4, 100])
    def test_other_capacities(self, tmp_path, rows, built):
        layer = trained()
        path = save(layer, tmp_path)
        other = prepare(make(rows=rows), built)
        restore(other, path)
        other.build(None)
        assert_same(state(other), state(layer))
        assert other.tables["ids"].capacity == rows
        # What comes now begins anew, and has the room there is.
        train(other, [21, 21, 22, 22])
        size = min(rows, 6)
        assert other.tables["ids"].size == size
        found = other({"f": tf.constant([21])}, training=False)["f"]
        np.testing.assert_array_equal(
            found, other.tables["ids"].table.numpy()[-2:-1]
        )

    def test_a_table_grows_as_far_as_it_may(self, tmp_path):
        layer = trained()
        path = save(layer, tmp_path)
        keys = DynamicKeys(when_full="grow", max_rows=5)
        other = make(rows=1, keys=keys)
        other.build(None)
        restore(other, path)
        assert other.tables["ids"].capacity == 4
        for name in ("keys", "parameters", "accumulators", "frequency"):
            np.testing.assert_array_equal(
                state(other)[f"ids/{name}"], state(layer)[f"ids/{name}"]
            )
        # There is no rule that remembers candidates.
        assert state(other)["ids/candidates"].shape == (0, 3)

    @nightly(without_kernels)
    @BUILT
    def test_less_rows_than_keys_are_an_error(self, tmp_path, built):
        path = save(trained(), tmp_path)
        keys = DynamicKeys(admission=FrequencyAdmission(2), eviction=None)
        other = make(rows=3, keys=keys)
        text = r"Table 'ids' has no room for 4 keys: .* 3 rows.*shrink=True"
        if not built:
            restore(other, path)
            with pytest.raises(ValueError, match=text):
                other.build(None)
            return
        train(other, [70, 70])
        before = tables_of(other)
        with pytest.raises(ValueError, match=text):
            restore(other, path)
        assert_same(tables_of(other), before)
        with (
            checkpoint.growing_tables(),
            pytest.raises(ValueError, match=text),
        ):
            restore(other, path)
        assert_same(tables_of(other), before)

    @nightly(without_kernels)
    @BUILT
    @pytest.mark.parametrize(
        ("eviction", "kept"),
        [("lru", [-7, 2]), ("lfu", [2, 5]), (TimeToLive(5), [-7, 2])],
    )
    def test_less_rows_leave_out_what_would_be_evicted_first(
        self, tmp_path, built, eviction, kept
    ):
        layer = trained()
        saved = state(layer)
        path = save(layer, tmp_path)
        other = make(rows=2, keys=DynamicKeys(eviction=eviction))
        said = pytest.warns(
            UserWarning,
            match=r"^Table 'ids' leaves out 2 of 4 keys of '.*checkpoint-1': "
            r"shard 0 of 1 would hold 4 of them, and has at most 2 rows\. "
            r"These are the keys that eviction=.* first",
        )
        if built:
            train(other, [70, 80])
            with said:
                restore(other, path)
        else:
            restore(other, path)
            with said:
                other.build(None)
        found = state(other)
        places = np.searchsorted(saved["ids/keys"], kept)
        for name in ("keys", "parameters", "accumulators", "last_used"):
            np.testing.assert_array_equal(
                found[f"ids/{name}"], saved[f"ids/{name}"][places], name
            )
        train(other, [kept[1], 90])
        np.testing.assert_array_equal(state(other)["ids/keys"], [kept[1], 90])

    @nightly(without_kernels)
    @pytest.mark.parametrize(
        ("eviction", "kept"),
        [
            ("lru", [-7, 2]),
            # Of 2, 1 and -7, -7 occurred less often than 2, as 1 did.
            ("lfu", [2, 5]),
            (TimeToLive(5), [-7, 2]),
            (None, [-7, 2]),
        ],
    )
    def test_a_smaller_table_keeps_what_would_go_last(
        self, tmp_path, eviction, kept
    ):
        layer = trained()
        saved = state(layer)
        path = save(layer, tmp_path)
        keys = DynamicKeys(
            admission=FrequencyAdmission(2), eviction=eviction, candidates=1
        )
        other = make(rows=2, keys=keys)
        train(other, [8, 8])
        with checkpoint.growing_tables(shrink=True):
            restore(other, path)
        found = state(other)
        places = np.searchsorted(saved["ids/keys"], kept)
        for name in ("keys", "parameters", "accumulators", "frequency"):
            np.testing.assert_array_equal(
                found[f"ids/{name}"], saved[f"ids/{name}"][places], name
            )
        # Of those last seen in one step the greater key.
        np.testing.assert_array_equal(found["ids/candidates"], [[9, 1, 3]])

    def test_shrinking_grows_others(self, tmp_path):
        layer = trained()
        path = save(layer, tmp_path)
        other = make(rows=50)
        other.build(None)
        with checkpoint.growing_tables(shrink=True):
            restore(other, path)
        assert_same(state(other), state(layer))

    @nightly(without_kernels)
    @BUILT
    def test_another_optimizer(self, tmp_path, built):
        path = save(trained(), tmp_path)
        other = prepare(make(optimizer="adam"), built)
        restore(other, path).expect_partial()
        other.build(None)
        found = state(other)
        np.testing.assert_array_equal(found["ids/keys"], [-7, 1, 2, 5])
        assert not found["ids/momenta"].any()
        assert found["ids/velocities"].shape == (4, DIM)

    @nightly(without_kernels)
    @BUILT
    @pytest.mark.parametrize("threshold", [0, None], ids=["engine", "keras"])
    def test_a_static_tables_rows_become_keys(self, tmp_path, built, threshold):
        static = make(rows=6, keys=False, size_threshold=threshold)
        train(static, [1, 5, 1], [3])
        path = save(static, tmp_path)
        other = prepare(make(rows=8), built)
        restore(other, path).expect_partial()
        other.build(None)
        found, saved = state(other), static.embedding_tables["ids"].numpy()
        np.testing.assert_array_equal(found["ids/keys"], range(6))
        np.testing.assert_array_equal(found["ids/parameters"], saved)
        np.testing.assert_array_equal(found["ids/frequency"], np.zeros(6))
        np.testing.assert_array_equal(found["ids/last_used"], np.zeros(6))
        assert found["ids/candidates"].shape == (0, 3)
        expected = np.full((6, DIM), 0.1, np.float32)
        if threshold == 0:
            expected = state(static)["ids/accumulators"]
        np.testing.assert_allclose(found["ids/accumulators"], expected)
        ids = {"f": tf.constant([5, 0, 6])}
        vectors = other(ids, training=False)["f"].numpy()
        np.testing.assert_array_equal(vectors[:2], saved[[5, 0]])
        assert not vectors[2].any()

    def test_a_static_table_that_is_too_large(self, tmp_path):
        path = save(train(make(rows=9, keys=False), [1]), tmp_path)
        other = trained()
        before = tables_of(other)
        with pytest.raises(ValueError, match="'ids' has no room for 9 keys"):
            restore(other, path)
        assert_same(tables_of(other), before)

    @BUILT
    def test_a_table_with_keys_does_not_become_a_static_one(
        self, tmp_path, built
    ):
        path = save(trained(), tmp_path)
        static = make(rows=4, keys=False)
        if built:
            train(static, [1])
            before = tables_of(static)
            with pytest.raises(ValueError, match=r"ids.*keys"):
                restore(static, path)
            assert_same(tables_of(static), before)
        else:
            restore(static, path)
            with pytest.raises(ValueError, match=r"ids.*keys"):
                static.build(None)

    @nightly(without_kernels)
    @BUILT
    @pytest.mark.parametrize("eviction", [None, "lru"])
    def test_a_layer_of_keys_gives_its_table(self, tmp_path, built, eviction):
        layer = layers.All2AllDenseEmbedding(
            8, DIM, 1, 1, optimizer="adagrad", eviction=eviction
        )
        for keys in ([3, 2**60, -4], [3, 5, 5]):
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(
                    layer(tf.constant(keys, tf.int64)[:, None, None])
                )
            differentiate(tape, loss, layer.trainable_variables)
        path = save(layer, tmp_path)
        other = prepare(make(), built)
        table = tf.train.Checkpoint(table=other.tables["ids"])
        tf.train.Checkpoint(layer=table).restore(path).expect_partial()
        other.build(None)
        found = state(other)
        for name, variable in layer.table.variables.items():
            expected = variable.numpy()
            if name == "last_used" and not built:
                expected = expected - 2  # Steps, as many ago.
            np.testing.assert_array_equal(found[f"ids/{name}"], expected, name)
        assert found["ids/keys"].size == 4
        if eviction is None:
            assert not found["ids/frequency"].any()

    @nightly(without_kernels)
    @pytest.mark.parametrize("steps", [0, 2])
    @pytest.mark.parametrize("kind", ["all2all", "embedding", "partial"])
    def test_a_table_alone_keeps_how_long_ago_keys_were_used(
        self, tmp_path, kind, steps
    ):
        rule = TimeToLive(3)
        if kind == "all2all":
            layer = layers.All2AllDenseEmbedding(8, DIM, 1, 1, eviction=rule)
        elif kind == "embedding":
            layer = layers.DynamicEmbedding(DIM, None, rule, input_dim=8)
        else:
            layer = make(keys=DynamicKeys(eviction=rule))
        for key in range(6):
            ids = tf.constant([[[key]]], tf.int64)
            if kind != "all2all":
                ids = ids[0, 0]
            with tf.GradientTape() as tape:
                vectors = layer({"f": ids} if kind == "partial" else ids)
                loss = tf.add_n(map(tf.reduce_sum, tf.nest.flatten(vectors)))
            differentiate(tape, loss, layer.trainable_variables)
        path = save(layer, tmp_path)
        other = make(rows=6, keys=DynamicKeys(eviction=rule))
        for _ in range(steps):
            train(other, [70])
        table = other.tables["ids"]
        moved = {
            "all2all": {"table": table},
            "embedding": {"tables": tf.train.Checkpoint(table=table)},
            "partial": {"tables": tf.train.Checkpoint(ids=table)},
        }
        restore(tf.train.Checkpoint(**moved[kind]), path)
        other.build(None)
        assert other.step.numpy() == steps
        np.testing.assert_array_equal(table.keys(), range(6))
        source = layer.tables["ids"] if kind == "partial" else layer.table
        np.testing.assert_array_equal(table.table, source.table)
        np.testing.assert_array_equal(
            steps - table.variables["last_used"].numpy(), [5, 4, 3, 2, 1, 0]
        )
        # What was used last stays longest, beside what comes.
        train(other, [100], [101])
        np.testing.assert_array_equal(table.keys(), [2, 3, 4, 5, 100, 101])
        assert table.evict() == 2
        np.testing.assert_array_equal(table.keys(), [4, 5, 100, 101])

    def test_uses_are_never_later_than_the_step(self, tmp_path):
        """Of a checkpoint that doesn't say when it was saved."""
        used = {**GOOD, "last_used": np.array([40, 49])}
        used["candidates"] = np.array([[1, 1, 50]])
        path = save(plain(**used), tmp_path)
        layer = trained()
        restore(layer, path)
        variables = layer.tables["ids"].variables
        np.testing.assert_array_equal(variables["last_used"].numpy(), [3, -6])
        np.testing.assert_array_equal(
            variables["candidates"].numpy(), [[1, 1, 4]]
        )

    @BUILT
    def test_scores(self, tmp_path, built):
        scored = DynamicKeys(eviction="score")
        layer = train(make(keys=scored), [1, 2, 5, -7], [9, 5])
        layer.tables["ids"].score([5, 2, -7], [-1.5, 0.25, 1e-40])
        saved = state(layer)
        path = save(layer, tmp_path)
        other = make(rows=4, keys=scored)
        if built:
            train(other, [70, 80, 5])
            other.tables["ids"].score([5, 70], [3, 4])
        with pytest.warns(UserWarning, match="'ids' leaves out 1 of 5 keys"):
            restore(other, path)
            other.build(None)
        # Of a shard with too few rows those with the least scores are left out.
        found, kept = state(other), np.array([True, True, True, False, True])
        for name in ("keys", "parameters", "score", "last_used"):
            np.testing.assert_array_equal(
                found[f"ids/{name}"], saved[f"ids/{name}"][kept], name
            )
        np.testing.assert_array_equal(
            found["ids/score"], np.float32([1e-40, 0, 0.25, 0])
        )
        train(other, [100])
        assert other.tables["ids"].keys().tolist() == [-7, 2, 9, 100]

        # Scores are no frequencies, nor frequencies scores.
        often = make(keys=DynamicKeys(eviction="lfu"))
        restore(often, path)
        often.build(None)
        assert not state(often)["ids/frequency"].any()
        train(often, [2, 2])
        restore(other, save(often, tmp_path))
        np.testing.assert_array_equal(state(other)["ids/score"], np.zeros(4))

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ([1, np.nan], "must be finite float32 .* nan for key number 1"),
            ([np.inf, 1], "must be finite float32 .* inf for key number 0"),
            ([1.0], r"must have the shape \[2\], .* got \[1\]"),
        ],
    )
    def test_scores_that_no_table_can_have(self, tmp_path, value, text):
        given = {**GOOD, "score": np.float32(value)}
        path = save(plain(**given), tmp_path)
        layer = train(make(keys=DynamicKeys(eviction="score")), [1, 2])
        layer.tables["ids"].score([1], [2])
        before = tables_of(layer)
        with pytest.raises(ValueError, match=f"'ids'.* scores {text}"):
            restore(layer, path)
        assert_same(tables_of(layer), before)

    def test_asynchronous_checkpoints(self, tmp_path):
        layer = trained()
        options = tf.train.CheckpointOptions(
            experimental_enable_async_checkpoint=True
        )
        saver = tf.train.Checkpoint(layer=layer)
        paths, states = [], []
        for i in range(3):
            states.append(state(layer))
            paths.append(saver.save(str(tmp_path / "checkpoint"), options))
            train(layer, [i, 20 + i, 20 + i, 30 + i, 30 + i], [2, 5])
        saver.sync()
        for path, expected in zip(paths, states, strict=True):
            other = make()
            other.build(None)
            restore(other, path).assert_existing_objects_matched()
            assert_same(state(other), expected)

    @nightly(without_kernels)
    def test_new_keys_after_restoring_begin_anew(self, tmp_path):
        layer = make(keys=DynamicKeys())
        train(layer, [1])
        path = save(layer, tmp_path)
        train(layer, [2, 3], [3, 2])
        restore(layer, path)
        # Of key 2 nothing is left.
        vectors = layer({"f": tf.constant([2])}, training=True)["f"]
        np.testing.assert_allclose(
            vectors[0], normal(SEED, 2, DIM), rtol=1e-4, atol=1e-6
        )
        train(layer, [2])
        np.testing.assert_array_equal(state(layer)["ids/frequency"], [1, 1])


def plain(**variables):
    """Variables where a layer's table has its own."""
    table = tf.train.Checkpoint(
        **{name: tf.Variable(value) for name, value in variables.items()}
    )
    return tf.train.Checkpoint(tables=tf.train.Checkpoint(ids=table))


GOOD = {
    "keys": np.array([7, -3]),
    "parameters": np.ones([2, DIM], np.float32),
    "accumulators": np.ones([2, DIM], np.float32),
    "frequency": np.array([4, 5]),
    "last_used": np.array([1, 2]),
    "candidates": np.array([[1, 1, 1]]),
}


def test_a_checkpoint_made_of_plain_variables(tmp_path):
    path = save(plain(**GOOD), tmp_path)
    layer = trained()
    restore(layer, path)
    table = layer.tables["ids"]
    np.testing.assert_array_equal(table.keys(), [-3, 7])
    np.testing.assert_array_equal(table.variables["frequency"].numpy(), [5, 4])


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("frequency", np.array([1, 2, 3]), r"frequency .*\[2\].* \[3\]"),
        ("last_used", np.array([1]), r"last_used .*\[2\].* \[1\]"),
        ("frequency", np.array([1.0, 2.0]), "frequency .*float64"),
        ("keys", np.array([3, 3]), "keys must all differ"),
        ("keys", np.array([[3]]), r"\[1, 1\], not int64 of shape \[n\]"),
        ("keys", np.array([3.0, 4.0]), "keys of float64"),
        ("keys", np.array([3, 4, 5]), r"frequency .*\[3\].* \[2\]"),
        ("candidates", np.array([1, 2]), r"candidates .*\[c, 3\]"),
        ("candidates", np.array([[1, 1, 1]] * 2), "candidates must all differ"),
        ("parameters", np.ones([2, 3], np.float32), "parameters"),
        ("accumulators", np.ones([3, DIM], np.float32), "accumulators"),
    ],
)
def test_what_does_not_fit_together_changes_nothing(
    tmp_path, name, value, text
):
    path = save(plain(**{**GOOD, name: value}), tmp_path)
    layer = trained()
    before = tables_of(layer)
    with pytest.raises(ValueError, match=text):
        restore(layer, path)
    assert_same(tables_of(layer), before)
    with pytest.raises(ValueError, match=text):
        later = make()
        restore(later, path)
        later.build(None)


DAY = 86_400
IN_DAYS = DynamicKeys(
    admission=FrequencyAdmission(2), eviction=TimeToLive(days=30)
)


@pytest.mark.usefixtures("both_implementations")
class TestTime:
    """Tables whose rules are in time, with a simulated clock."""

    @pytest.fixture(autouse=True)
    def days(self):
        days = [1000]
        with tfrs_embed.testing.simulated_clock(lambda: DAY * days[0]):
            yield days

    def used(self, layer):
        """Each key's last use in days, and that of each candidate."""
        variables = layer.tables["ids"].variables
        times = variables["last_used_time"].numpy() / (DAY * 1e6)
        seen = variables["candidates"].numpy()
        return (
            dict(zip(layer.tables["ids"].keys().tolist(), times, strict=True)),
            dict(
                zip(seen[:, 0].tolist(), seen[:, 2] / (DAY * 1e6), strict=True)
            ),
        )

    def trained(self, days, **options):
        """Keys 1 and 2 with rows, used on days 1000 and 1020, 9 without."""
        layer = train(make(keys=IN_DAYS, **options), [1, 1])
        days[0] += 20
        return train(layer, [2, 2, 9])

    def test_a_checkpoint_keeps_times(self, tmp_path, days):
        path = save(self.trained(days), tmp_path)
        days[0] = 1031
        layer = make(keys=IN_DAYS)
        restore(layer, path)
        layer.build(None)
        assert self.used(layer) == ({1: 1000, 2: 1020}, {9: 1020})
        assert layer.evict("ids") == 1
        assert layer.tables["ids"].keys().tolist() == [2]

    @nightly(without_kernels)
    @pytest.mark.parametrize("form", ["keras", "weights.h5"])
    def test_files_of_keras_keep_times(self, tmp_path, days, form):
        def make_model():
            layer = make(keys=IN_DAYS)
            inputs = {"f": keras.Input((), dtype="int64", name="f")}
            return keras.Model(inputs, layer(inputs)["f"]), layer

        model, layer = make_model()
        train(layer, [1, 1])
        days[0] += 20
        train(layer, [2, 2, 9])
        path = str(tmp_path / f"model.{form}")
        if form == "keras":
            model.save(path)
            other = keras.models.load_model(path).layers[-1]
        else:
            model.save_weights(path)
            again, other = make_model()
            again.load_weights(path)
        assert self.used(other) == ({1: 1000, 2: 1020}, {9: 1020})

    @nightly(without_kernels)
    def test_a_clock_that_goes_back_expires_nothing(self, tmp_path, days):
        layer = self.trained(days, rows=2)
        days[0] = 3
        assert layer.evict("ids") == 0
        train(layer, [2, 7, 7])
        assert self.used(layer)[0] == {2: 1020, 7: 1020}
        path = save(layer, tmp_path)
        with pytest.raises(ValueError, match=r"'ids'.*more than a day after"):
            restore(layer, path)
        days[0] = 1019.5
        restore(layer, path)
        assert self.used(layer)[0] == {2: 1020, 7: 1020}

    @nightly(without_kernels)
    def test_times_in_the_future_are_refused(self, days):
        layer = self.trained(days)
        variables = layer.tables["ids"].variables
        before = state(layer)
        late = int(1022 * DAY * 1e6)
        for name, value in (
            ("last_used_time", [0, late]),
            ("candidates", [[4, 1, late]]),
        ):
            with pytest.raises(ValueError, match="more than a day after"):
                variables[name].assign(np.array(value))
        assert_same(state(layer), before)

    @nightly(without_kernels)
    def test_steps_become_times(self, tmp_path, days):
        path = save(trained(), tmp_path)
        layer = make(keys=IN_DAYS)
        restore(layer, path)
        layer.build(None)
        keys, candidates = self.used(layer)
        ages = {k: round((days[0] - v) * DAY) for k, v in keys.items()}
        assert ages == {1: 3, 2: 0, 5: 2, -7: 1}
        ages = {k: round((days[0] - v) * DAY) for k, v in candidates.items()}
        assert ages == {4: 1, 9: 1}
        train(layer, [1])
        assert self.used(layer)[0][1] == 1000

    @nightly(without_kernels)
    def test_nothing_expires_by_another_unit(self, tmp_path, days):
        path = save(trained(), tmp_path)
        soon = DynamicKeys(eviction=TimeToLive(seconds=2))
        layer = make(keys=soon)
        restore(layer, path)
        layer.build(None)
        assert layer.evict("ids") == 0
        days[0] += 1 / DAY
        assert layer.evict("ids") == 2  # 1 and 5.

    @nightly(without_kernels)
    @BUILT
    def test_times_become_steps(self, tmp_path, days, built):
        path = save(self.trained(days), tmp_path)
        layer = make(keys=DynamicKeys(eviction=TimeToLive(9_000_000)))
        if built:
            layer.build(None)
        restore(layer, path)
        layer.build(None)
        variables = layer.tables["ids"].variables
        np.testing.assert_array_equal(
            variables["last_used"].numpy(), [2 - 20 * DAY, 2]
        )
        train(layer, [2])
        np.testing.assert_array_equal(
            variables["last_used"].numpy(), [2 - 20 * DAY, 3]
        )

    def test_a_checkpoint_with_both_units_is_refused(self, tmp_path):
        both = {**GOOD, "last_used_time": GOOD["last_used"]}
        path = save(plain(**both), tmp_path)
        with pytest.raises(ValueError, match="both steps and times"):
            restore(trained(), path)


@nightly(without_kernels)
@pytest.mark.usefixtures("both_implementations")
@pytest.mark.parametrize("rule", ["lru", "lfu"])
def test_a_stream_with_saves_and_restores(tmp_path, rule):
    universe = tuple(int(k) for k in np.arange(12) * 2**58 - 2**61)
    keys = DynamicKeys(
        admission=FrequencyAdmission(2), eviction=rule, candidates=4
    )
    case = TableCase(5, keys, "adam", universe)
    tables = Tables({"f": Feature("ids")}, {"ids": case})
    layer = tables.layer()
    layer.build(None)
    rng = np.random.default_rng(5)
    saved = []
    for number in range(40):
        ids = {"f": rng.integers(0, 12, 5) // rng.integers(1, 4)}
        tables.run(layer, train_to, ids, None, rng)
        tables.assert_same(layer)
        if number % 6 == 2:
            path = save(layer, tmp_path / str(number))
            saved.append((path, tables.stored("ids")))
        if number % 9 == 8:
            path, stored = saved[rng.integers(len(saved))]
            if number % 2:  # Where the process was killed.
                layer = tables.layer()
            restore(layer, path)
            layer.build(None)
            tables.restore("ids", stored)
            tables.assert_same(layer)


# Stored beside tables, or in them; paths; what paths are made of.
NAMES = ["a.b", "a.b/keys", "."]
FORMATS = [
    "keras",
    "weights.h5",
    *of_keras_2("ckpt", "old.h5"),
    "checkpoint",
]


def make_model(names=("numbers", "words"), kind="partial"):
    inputs = keras.Input((), dtype="string")
    rule = FrequencyAdmission(2)
    if kind == "embedding":
        layer = layers.DynamicEmbedding(
            DIM, ["x", "q"], input_dim=6, embedding_initializer=initializer()
        )
        vectors = layer(inputs)
    else:
        layer = layers.PartialTPUEmbedding(
            [
                tfrs_embed.FeatureConfig(
                    f"f{i}",
                    tfrs_embed.TableConfig(
                        name,
                        6 + i,
                        DIM,
                        initializer(),
                        keys=DynamicKeys("string", rule, "lfu"),
                    ),
                )
                for i, name in enumerate(names)
            ],
            "adam",
        )
        vectors = keras.layers.Add()(layer([inputs] * len(names)))
    head = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.GlorotUniform(seed=4)
    )
    return keras.Model(inputs, head(vectors)), layer


def fit(model, *texts):
    """Trains eagerly: tracing takes longer than all that is tested here."""
    optimizer = keras.optimizers.SGD(0.1)
    for text in texts:
        with tf.GradientTape() as tape:
            found = model(tf.constant(list(text)), training=True)
            loss = tf.reduce_sum((found - 1) ** 2)
        variables = model.trainable_variables
        gradients = tape.gradient(loss, variables)
        optimizer.apply_gradients(zip(gradients, variables, strict=True))


@on("keras:3", tier="more")
@nightly(
    lambda kind, form: (
        kind == "embedding" and form not in ("keras", "checkpoint")
    )
)
@pytest.mark.parametrize("kind", ["names", "embedding"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_saved_model_goes_on_as_the_model_does(tmp_path, form, kind):
    names = NAMES if kind == "names" else ("numbers",)
    model, layer = make_model(names, kind)
    fit(model, "xyzz", "yxxw")
    path = str(tmp_path / f"model.{form}")
    if form == "keras":
        model.save(path)
        other = keras.models.load_model(path)
        again = other.layers[1]
    else:
        other, again = make_model(names, kind)
        fit(other, "abba")
        if form == "checkpoint":
            written = tf.train.Checkpoint(model=model).save(path)
            tf.train.Checkpoint(model=other).restore(written)
        else:
            model.save_weights(path)
            other.load_weights(path)
    assert type(again) is type(layer)
    assert_same(state(again), state(layer))
    for each in (model, other):
        fit(each, "wvza", "xxcc")
    assert_same(state(again), state(layer))
    sizes = [len(v) for k, v in state(layer).items() if k.endswith("/keys")]
    assert min(sizes) > 1


@on("keras:3", tier="more")
@pytest.mark.parametrize("form", [f for f in FORMATS if f != "keras"])
def test_a_smaller_models_table_takes_a_part_of_checkpoints_alone(
    tmp_path, form
):
    def make(rows):
        inputs = keras.Input((), dtype="int64")
        layer = layers.DynamicEmbedding(
            DIM, None, "lfu", input_dim=rows, optimizer="adam"
        )
        head = keras.layers.Dense(1, kernel_initializer="ones")
        return keras.Model(inputs, head(layer(inputs))), layer

    model, layer = make(6)
    # The first ones occur most often, and the even ones were used last.
    for keys in ([0, 0, 0, 0, 1, 1, 1, 2, 2], [3, 4, 5], [2, 4, 0]):
        fit(model, keys)
    saved = {k: v.numpy() for k, v in layer.table.variables.items()}
    other, again = make(4)
    fit(other, [7, 8])
    path = str(tmp_path / f"model.{form}")
    if form == "checkpoint":
        path = tf.train.Checkpoint(model=model).save(path)
        load = tf.train.Checkpoint(model=other).restore
    else:
        model.save_weights(path)
        load = other.load_weights
    if form in ("checkpoint", "ckpt"):
        with pytest.warns(UserWarning, match="leaves out 2 of 6 keys"):
            load(path)
        for name, value in saved.items():
            found = again.table.variables[name].numpy()
            if name != "candidates":
                value = value[[0, 1, 2, 4]]
            np.testing.assert_array_equal(found, value, name)
        return
    before = state(again)
    with pytest.raises(ValueError, match=r"no room for 6.*checkpoint's keys"):
        load(path)
    assert_same(state(again), before)


def test_a_file_with_too_many_keys_for_one_table_changes_none(tmp_path):
    def make(rows):
        tables = [
            tfrs_embed.TableConfig(
                name, size, DIM, keys=DynamicKeys(eviction=None)
            )
            for name, size in (("a", 9), ("b", rows))
        ]
        features = [tfrs_embed.FeatureConfig(t.name, t) for t in tables]
        layer = layers.PartialTPUEmbedding(features, "sgd")
        inputs = keras.Input((), dtype="int64")
        vectors = keras.layers.Add()(layer([inputs, inputs]))
        return keras.Model(inputs, keras.layers.Dense(1)(vectors)), layer

    model, _ = make(9)
    fit(model, [1, 2, 3, 4])
    path = str(tmp_path / "model.weights.h5")
    model.save_weights(path)
    other, again = make(3)
    fit(other, [5, 6])
    before = state(again)
    with pytest.raises(ValueError, match=r"'b' has no room for 4 keys"):
        other.load_weights(path)
    assert_same(state(again), before)


@pytest.mark.parametrize("kind", ["partial", "embedding"])
def test_weights_can_be_read_and_set(kind):
    # As EarlyStopping does, which keeps those of the best epoch.
    model, layer = make_model(kind=kind)
    fit(model, "xyzzyxxw")
    best, weights = state(layer), model.get_weights()
    fit(model, "abccbaad")
    assert state(layer)["step"] != best["step"]
    model.set_weights(weights)
    assert_same(state(layer), best)


LOAD = """
import json, sys
import numpy as np
import tensorflow as tf

folder = sys.argv[1]
given = json.load(open(folder + "/inputs.json"))
served = tf.saved_model.load(folder + "/model").signatures["serving_default"]
found = served(**{
    "numbers": tf.constant(given["numbers"], tf.uint64),
    "words": tf.constant(given["words"]),
    "ragged_values": tf.constant(given["ragged"], tf.string),
    "ragged_row_splits": tf.constant(given["splits"], tf.int64),
})
np.savez(folder + "/found.npz", **found)
assert not {"tfrs_embed", "tf_keras"} & set(sys.modules)
"""


@pytest.mark.more
@on("keras:3", tier="nightly")
def test_an_exported_model_needs_nothing_of_this_library(tmp_path):
    numbers = tfrs_embed.TableConfig(
        "numbers", 9, DIM, initializer(), keys=DynamicKeys("uint64")
    )
    texts = tfrs_embed.TableConfig(
        "words",
        9,
        DIM,
        initializer(),
        keys=DynamicKeys("string", FrequencyAdmission(2)),
    )
    layer = layers.PartialTPUEmbedding(
        {
            "numbers": tfrs_embed.FeatureConfig("numbers", numbers),
            "words": tfrs_embed.FeatureConfig("words", texts),
            "ragged": tfrs_embed.FeatureConfig("ragged", texts),
        },
        "adagrad",
    )

    def inputs(numbers, words, ragged):
        return {
            "numbers": tf.constant(numbers, tf.uint64),
            "words": tf.constant(words),
            "ragged": tf.ragged.constant(ragged, tf.string),
        }

    with tf.GradientTape() as tape:
        vectors = layer(
            inputs([2**64 - 1, 7, 7], ["x", "y", "x"], [["z"], [], ["z", "y"]]),
            training=True,
        )
        loss = tf.add_n([tf.reduce_sum(v) for v in vectors.values()])
    differentiate(tape, loss, layer.trainable_variables)
    size = layer.tables["words"].size
    assert size == 3
    specs = {
        "numbers": tf.TensorSpec([None], tf.uint64),
        "words": tf.TensorSpec([None], tf.string),
        "ragged": tf.RaggedTensorSpec([None, None], tf.string),
    }
    export(layer, tmp_path / "model", specs)
    asked = inputs([7, 2**64 - 1, 0], ["z", "q", "y"], [["x", "q"], ["q"], []])
    given = {
        "numbers": [7, 2**64 - 1, 0],
        "words": ["z", "q", "y"],
        "ragged": ["x", "q", "q"],
        "splits": [0, 2, 3, 3],
    }
    (tmp_path / "inputs.json").write_text(json.dumps(given))
    environment = {
        k: v for k, v in os.environ.items() if k != "TF_USE_LEGACY_KERAS"
    }
    done = subprocess.run(
        [sys.executable, "-c", LOAD, str(tmp_path)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = np.load(tmp_path / "found.npz")
    expected = layer(asked, training=False)
    for name, vectors in expected.items():
        np.testing.assert_allclose(found[name], vectors, rtol=1e-6)
    assert found["numbers"][:2].any(1).all() and not found["numbers"][2].any()
    assert not found["words"][1].any() and not found["ragged"][1:].any()
    # The layer itself is what it was.
    assert layer.tables["words"].size == size


@pytest.mark.parametrize("kind", ["embedding", "all2all", "empty"])
@pytest.mark.parametrize("rows", ["float32", "int8"])
def test_other_layers_are_exported(tmp_path, kind, rows):
    if kind == "all2all":
        layer = layers.All2AllDenseEmbedding(8, DIM, 1, 1, eviction="lru")
        shape = (2, 1, 1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(tf.constant([[[3]], [[5]]], tf.int64)))
        differentiate(tape, loss, layer.trainable_variables)
    else:
        first = None if kind == "empty" else [3, 5]
        layer = layers.DynamicEmbedding(DIM, first, input_dim=8)
        shape = (2,)
        layer.build(None)
    spec = tf.TensorSpec([None, *shape[1:]], tf.int64)
    export(layer, tmp_path / "model", spec, rows=rows)
    served = tf.saved_model.load(str(tmp_path / "model"))
    asked = tf.reshape(tf.constant([5, 4], tf.int64), shape)
    found = served.serve(asked).numpy()
    np.testing.assert_allclose(found, layer(asked), rtol=0.01, atol=1e-3)
    assert found[0].any() == (kind != "empty")
    assert not found[1].any()


def test_tensorflows_own_export_is_refused(tmp_path):
    model, _ = make_model()
    fit(model, "xyzzyxxw")
    with pytest.raises(RuntimeError, match=r"tfrs_embed\.serving\.export"):
        tf.saved_model.save(model, str(tmp_path / "model"))
