"""Rows that keys without a row share: saved, served, averaged, refused."""

import numpy as np
import pytest
import tensorflow as tf

import tfrs_embed
from dynamic_reference import shard_of
from keras_under_test import keras, layers
from process_tiers import nightly, without_kernels
from tfrs_embed import DynamicKeys, FrequencyAdmission, checkpoint
from tfrs_embed.serving import export, export_delta
from training_helpers import (
    assert_same,
    checkpoint_command,
    differentiate,
    state,
)

DIM, SHARED = 4, 3
ADMITTED = FrequencyAdmission(2)
EVERY = [*range(-4, 12), 2**62, -(2**63)]


def make(shared=SHARED, rows=5, dtype="int64", optimizer="adagrad", **keys):
    """A layer of one table, with `shared` rows for keys without one."""
    keys = {"admission": ADMITTED, **keys}
    table = tfrs_embed.TableConfig(
        "ids",
        rows,
        DIM,
        keras.initializers.RandomNormal(seed=3),
        keys=DynamicKeys(dtype, fallback_rows=shared, **keys),
    )
    feature = tfrs_embed.FeatureConfig("f", table)
    return layers.PartialTPUEmbedding(
        {"f": feature}, optimizer, size_threshold=0
    )


def train(layer, *steps):
    for keys in steps:
        with tf.GradientTape() as tape:
            vectors = layer({"f": tf.constant(keys)}, training=True)["f"]
            loss = tf.reduce_sum((vectors - 1) ** 2)
        differentiate(tape, loss, layer.trainable_variables)
    return layer


def trained(track=False, **options):
    """Keys 1, 2, 5 with rows, others without."""
    layer = make(**options)
    if track:
        layer.tables["ids"].track_changes()
    return train(layer, [1, 1, 2], [5, 2, 5, 7, 8], [7, 9, 4], [2, -4, -4, 11])


def look_up(layer, keys=EVERY):
    return layer({"f": tf.constant(keys)}, training=False)["f"].numpy()


def restore(layer, path):
    return tf.train.Checkpoint(layer=layer).restore(path)


@pytest.mark.usefixtures("both_implementations")
def test_keys_without_a_row_have_shared_ones():
    layer = trained()
    held = state(layer)
    own = {int(key): i for i, key in enumerate(held["ids/keys"])}
    assert {1, 2, 5} <= own.keys() and 9 not in own
    expected = [
        held["ids/parameters"][own[key]]
        if key in own
        else held["ids/fallback_parameters"][shard_of(key, SHARED)]
        for key in EVERY
    ]
    np.testing.assert_array_equal(look_up(layer), expected)
    before = look_up(layer, [1])
    assert layer.tables["ids"].remove([1]) == 1
    assert np.any(look_up(layer, [1]) != before)
    place = shard_of(1, SHARED)
    shared = held["ids/fallback_parameters"][place : place + 1]
    np.testing.assert_array_equal(look_up(layer, [1]), shared)
    # Keys that are given rows without a step start from the initializer.
    layer.tables["ids"].give_rows([1])
    first = make()
    first.build(None)
    first.tables["ids"].give_rows([1])
    np.testing.assert_array_equal(look_up(layer, [1]), look_up(first, [1]))


def test_a_row_that_changes_its_key_is_the_shared_one_for_readers():
    """Between finding a row and reading it, as other threads may see it."""
    layer = make(rows=4, admission=None, optimizer="sgd")
    train(layer, [1, 2, 3, 4])
    shard = layer.tables["ids"]._rows.shards[0]
    keys = tf.constant([1, 2, 3, 4, 5], tf.int64)
    found = shard.key_table.lookup(keys)
    train(layer, [6, 7])  # In the place of the keys 1 and 2.
    read = shard.store.read_found(shard.key_table, found)
    np.testing.assert_array_equal(read, look_up(layer, [1, 2, 3, 4, 5]))
    held = state(layer)["ids/fallback_parameters"]
    for place, key in ((0, 1), (1, 2), (4, 5)):
        np.testing.assert_array_equal(read[place], held[shard_of(key, SHARED)])


@pytest.mark.parametrize("built", [False, True], ids=["later", "built"])
@nightly(without_kernels)
@pytest.mark.usefixtures("both_implementations")
def test_a_checkpoint_restores_shared_rows(tmp_path, built):
    layer = trained()
    saved = state(layer)
    assert saved["ids/fallback_accumulators"].shape == (SHARED, DIM)
    path = tf.train.Checkpoint(layer=layer).save(str(tmp_path / "saved"))
    reader = tf.train.load_checkpoint(path)
    key = "layer/tables/ids/fallback_parameters/.ATTRIBUTES/VARIABLE_VALUE"
    np.testing.assert_array_equal(
        reader.get_tensor(key), saved["ids/fallback_parameters"]
    )
    other = make()
    if built:
        train(other, [70, 70, 5, 80, 5, 6], [5, 5])
    status = restore(other, path)
    other.build(None)
    status.assert_consumed()
    assert_same(state(other), saved)
    for each in (layer, other):
        train(each, [4, 5, 11], [9, 12, 12])
    assert_same(state(other), state(layer))


def test_a_checkpoint_of_another_number_of_shared_rows_changes_nothing(
    tmp_path,
):
    path = tf.train.Checkpoint(layer=trained()).save(str(tmp_path / "saved"))
    other = trained(shared=SHARED + 1)
    before = state(other)
    with pytest.raises(
        ValueError, match=r"\[4, 4\] here, and \[3, 4\].* fallback_rows must"
    ):
        restore(other, path)
    assert_same(state(other), before)


def test_checkpoints_with_and_without_shared_rows(tmp_path):
    plain, shared = trained(shared=None), trained()
    paths = [
        tf.train.Checkpoint(layer=each).save(str(tmp_path / name / "saved"))
        for name, each in (("plain", plain), ("shared", shared))
    ]
    own = state(shared)
    restore(shared, paths[0])
    found, expected = state(shared), state(plain)
    for name, value in found.items():
        if "fallback" in name:  # They are as they were.
            value, expected[name] = own[name], value
        np.testing.assert_array_equal(value, expected[name], name)
    # A table without such rows leaves them out.
    restore(plain, paths[1]).expect_partial()
    for name, value in state(plain).items():
        np.testing.assert_array_equal(value, own[name], name)


def test_deltas_have_shared_rows(tmp_path):
    layer = make()
    layer.tables["ids"].track_changes()
    layer.build(None)
    manager = checkpoint.DeltaManager(
        tf.train.Checkpoint(layer=layer), str(tmp_path)
    )
    for keys in ([1, 1, 2], [7, 8, 9], [3, 3, 7]):
        train(layer, keys)
        path = manager.save()
    assert len(tf.io.gfile.glob(f"{tmp_path}/*.index")) == 3
    other = make()
    restore(other, path)
    other.build(None)
    assert_same(state(other), state(layer))


@pytest.mark.parametrize("form", ["keras", "weights.h5"])
def test_keras_files_have_shared_rows(tmp_path, form):
    def model_of(layer):
        ids = keras.Input((), dtype="int64")
        return keras.Model(ids, layer({"f": ids})["f"])

    layer = trained()
    model, path = model_of(layer), str(tmp_path / f"model.{form}")
    if form == "keras":
        model.save(path)
        [_, other] = keras.models.load_model(path).layers
    else:
        model.save_weights(path)
        other = make()
        model_of(other).load_weights(path)
        few = make(shared=SHARED + 1)
        before = model_of(few) and state(few)
        with pytest.raises(ValueError, match="fallback_parameters have the"):
            model_of(few).load_weights(path)
        assert_same(state(few), before)
    assert_same(state(other), state(layer))
    assert other.tables["ids"].spec.keys == layer.tables["ids"].spec.keys
    model.set_weights(model.get_weights())
    assert_same(state(other), state(layer))


class Model(keras.Model):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, ids):
        return self.layer({"f": ids})["f"]


def served(model, folder, ids=EVERY, **options):
    given = tf.constant(ids)
    model(given)  # This builds it.
    spec = tf.TensorSpec([None], given.dtype)
    export(model, folder, spec, **options)
    return tf.saved_model.load(str(folder))


@pytest.mark.parametrize("updatable", [False, True])
@pytest.mark.parametrize("rows", ["float32", "int8", "int4"])
def test_an_exported_model_has_shared_rows(tmp_path, rows, updatable):
    layer = trained(track=updatable)
    loaded = served(
        Model(layer), tmp_path / "model", rows=rows, updatable=updatable
    )
    found = loaded.serve(tf.constant(EVERY, tf.int64))
    error = {"float32": 0, "int8": 1 / 254, "int4": 1 / 14}[rows]
    largest = np.abs(look_up(layer)).max()
    np.testing.assert_allclose(
        found, look_up(layer), rtol=0, atol=1.01 * error * largest
    )
    assert np.all(np.any(found != 0, 1))


def test_an_exported_model_without_keys_has_shared_rows(tmp_path):
    layer = make(dtype="string")
    words = ["red", "blue", "green", "ä"]
    layer({"f": tf.constant(words)})
    loaded = served(Model(layer), tmp_path / "model", words)
    assert layer.tables["ids"].size == 0
    found = loaded.serve(tf.constant(words))
    np.testing.assert_array_equal(found, look_up(layer, words))


def test_deltas_of_an_exported_model_have_shared_rows(tmp_path):
    layer = make()
    layer.tables["ids"].track_changes()
    layer.build(None)
    model = Model(layer)
    loaded = served(model, tmp_path / "base", updatable=True)
    since = tmp_path / "base"
    for number, keys in enumerate(([1, 1, 2], [7, 8, 9], [3, 3, 4, 4, 7]), 1):
        train(layer, keys)
        delta = tmp_path / f"delta-{number}"
        assert export_delta(model, delta, since=since) == number
        loaded.apply_delta(str(delta))
        since = delta
        found = loaded.serve(tf.constant(EVERY, tf.int64))
        np.testing.assert_array_equal(found, look_up(layer))


def test_top_k_finds_keys_alone(tmp_path):
    layer = trained()
    table = layer.tables["ids"]
    held = state(layer)

    def best(queries):
        scores, keys = table.top_k(queries, 2)
        return {"scores": scores, "keys": keys}

    queries = np.eye(DIM, dtype=np.float32)[:2]
    scores = queries @ held["ids/parameters"].T
    expected = held["ids/keys"][np.argsort(-scores, 1, kind="stable")[:, :2]]
    np.testing.assert_array_equal(table.top_k(queries, 2)[1], expected)
    loaded = served(
        Model(layer),
        tmp_path / "model",
        signatures={"best": (best, [tf.TensorSpec([None, DIM])])},
    )
    found = loaded.signatures["best"](queries=tf.constant(queries))
    np.testing.assert_array_equal(found["keys"], expected)


def test_an_average_has_the_average_of_shared_rows():
    layer, average = trained(), make()
    train(average, [2, 2, 3, 3])
    before = state(average)
    average.assign_moving_average(layer, rate=0.25)
    name = "ids/fallback_parameters"
    expected = 0.25 * before[name] + 0.75 * state(layer)[name]
    np.testing.assert_allclose(state(average)[name], expected, rtol=1e-5)
    with pytest.raises(ValueError, match="another shape or keys"):
        make_built(SHARED + 1).assign_moving_average(layer, rate=0.5)


def make_built(shared):
    layer = make(shared=shared)
    layer.build(None)
    return layer


def test_a_frozen_layer_reads_shared_rows():
    layer = trained()
    before = state(layer)
    layer.trainable = False
    keys = {"f": tf.constant([1, 9, 11])}
    found = layer(keys, training=True)["f"]
    np.testing.assert_array_equal(found, look_up(layer, [1, 9, 11]))
    assert_same(state(layer), before)


def test_shared_rows_take_memory():
    layer = make(shared=7, rows=5)
    [placed] = layer.placement.tables
    assert placed.rows == 12
    assert placed.bytes == 12 * 2 * DIM * 4


@pytest.mark.parametrize("value", [0, -1, 1.5, "4", True])
def test_wrong_numbers_are_refused(value):
    with pytest.raises((ValueError, TypeError), match="fallback_rows"):
        DynamicKeys(fallback_rows=value)


def test_a_spill_is_refused():
    spill = tfrs_embed.FileStorage("spill")
    with pytest.raises(ValueError, match=r"fallback_rows=3 is for .* spill"):
        DynamicKeys(fallback_rows=3, spill=spill)


@pytest.mark.usefixtures("both_implementations")
def test_tables_of_a_width_are_as_if_alone():
    """Tables with equally many shared rows, with others, and without."""
    counts = {"a": 3, "b": 3, "c": 2, "d": None}

    def layer_of(names):
        return layers.PartialTPUEmbedding(
            {
                name: tfrs_embed.FeatureConfig(
                    name,
                    tfrs_embed.TableConfig(
                        name,
                        4,
                        DIM,
                        keras.initializers.RandomNormal(seed=ord(name)),
                        keys=DynamicKeys(
                            admission=ADMITTED, fallback_rows=counts[name]
                        ),
                    ),
                )
                for name in names
            },
            "adagrad",
            size_threshold=0,
        )

    def run(layer, names):
        for step in range(4):
            ids = {
                name: tf.constant([step, 2, ord(name), 7 * step, step])
                for name in names
            }
            with tf.GradientTape() as tape:
                vectors = layer(ids, training=True)
                loss = tf.add_n(
                    [tf.reduce_sum((v - 1) ** 2) for v in vectors.values()]
                )
            differentiate(tape, loss, layer.trainable_variables)
        found = layer({name: tf.constant(EVERY) for name in names})
        return {**state(layer), **{n: v.numpy() for n, v in found.items()}}

    together = run(layer_of(counts), counts)
    for name in counts:
        for what, value in run(layer_of([name]), [name]).items():
            np.testing.assert_array_equal(together[what], value, what)


@pytest.mark.usefixtures("both_implementations")
def test_a_step_that_fails_changes_no_shared_row():
    layer = trained(eviction=None, admission=None, rows=12)
    before = state(layer)
    with pytest.raises(tf.errors.InvalidArgumentError, match="no room"):
        train(layer, [9, *range(100, 120)])
    assert_same(state(layer), before)


@pytest.mark.tools
def test_an_exported_model_with_shared_rows_is_not_converted(tmp_path, capsys):
    served(Model(trained()), tmp_path / "model")
    given = str(tmp_path / "model"), str(tmp_path / "new")
    assert checkpoint_command(["convert", *given]) != 0
    assert "rows, but keys of shape" in capsys.readouterr().err
