"""Each layer's tables of each kind are converted, and restored as they were."""

import functools
import json
import re

import pytest
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers
from process_tiers import on
from tfrs_embed import (
    DynamicKeys,
    FeatureConfig,
    FrequencyAdmission,
    Hash,
    TableConfig,
)
from tfrs_embed.compat import keras_versions
from training_helpers import assert_same, differentiate, state
from training_helpers import checkpoint_command as main

pytestmark = [pytest.mark.tools, on("keras:3", tier="nightly")]

ROWS, DIM, RATE = 12, 4, 0.25
KEYS = [10**12, -3, 7, 10**12, 4, 7, 10**12]
IDS = [0, 3, 7, 3, 4, 7, 3]
WORDS = ["a", "b", "c", "a", "d", "c", "a"]
#: Only keys that occur twice get rows; the others are candidates.
DYNAMIC = DynamicKeys(admission=FrequencyAdmission(2), eviction="lru")
SCORED = DynamicKeys(admission=FrequencyAdmission(2), eviction="score")
FALLBACK = DynamicKeys(admission=FrequencyAdmission(2), fallback_rows=2)
STRINGS = DynamicKeys(tf.string)
COUNTERS = ("frequency", "score", "last_used", "candidates")


def table(**settings):
    return TableConfig("t", ROWS, DIM, **settings)


def partial(config, size_threshold=0, **feature):
    return layers.PartialTPUEmbedding(
        FeatureConfig("x", config, **feature),
        "adagrad",
        size_threshold=size_threshold,
    )


def distributed(config, **feature):
    return layers.DistributedEmbedding(
        FeatureConfig("x", config, **feature), optimizer="adagrad"
    )


def all2all(**settings):
    return layers.All2AllDenseEmbedding(
        ROWS, DIM, 1, 1, optimizer="adagrad", **settings
    )


def dynamic(**settings):
    return layers.DynamicEmbedding(
        DIM, input_dim=ROWS, optimizer="adagrad", **settings
    )


#: By layer and kind of table: what makes the layer, and keys for it.
CASES = {
    "partial-large": (lambda: partial(table()), IDS),
    "partial-small": (lambda: partial(table(), size_threshold=99), IDS),
    "partial-dynamic": (lambda: partial(table(keys=DYNAMIC)), KEYS),
    "partial-fallback": (lambda: partial(table(keys=FALLBACK)), KEYS),
    "partial-strings": (lambda: partial(table(keys=STRINGS)), WORDS),
    "partial-hashed": (lambda: partial(table(), hashing=Hash(salt=1)), KEYS),
    "distributed-static": (lambda: distributed(table()), IDS),
    "distributed-dynamic": (lambda: distributed(table(keys=SCORED)), KEYS),
    "distributed-hashed": (
        lambda: distributed(table(), hashing=Hash(salt=1)),
        KEYS,
    ),
    "all2all-keys": (all2all, KEYS),
    "all2all-rows": (lambda: all2all(use_hashtable=False), IDS),
    "all2all-dynamic": (lambda: all2all(eviction="lru"), KEYS),
    "dynamic-keys": (lambda: dynamic(admission=FrequencyAdmission(2)), KEYS),
    "dynamic-strings": (lambda: dynamic(key_dtype=tf.string), WORDS),
    "embedding-ids": (lambda: layers.Embedding(ROWS, DIM), IDS),
}
ALL = pytest.mark.parametrize("case", CASES)
#: Those with tables of Keras's.
OF_KERAS = ("partial-small", "embedding-ids")


def rate(layer):
    """The optimizer of a layer's table; None: the layer has none."""
    if hasattr(layer, "table_optimizers"):
        return next(iter(layer.table_optimizers.values()), None)
    return getattr(layer, "table_optimizer", None)


def numbers(layer):
    """All that a layer's table has, by name."""
    if isinstance(layer, layers.Embedding):
        return {"embeddings": keras_versions.variable(layer.embeddings).numpy()}
    found = state(layer)
    if rate(layer) is not None:
        found["learning_rate"] = rate(layer).learning_rate
    return found


@functools.cache
def model_of(case):
    """A model of a layer, trained for two steps, and the layer."""
    make, keys = CASES[case]
    layer = make()
    shape = [1, 1] if case.startswith("all2all") else []
    dtype = "string" if keys is WORDS else "int64"
    inputs = keras.Input(shape, dtype=dtype)
    vectors = layer(inputs)
    model = keras.Model(inputs, vectors)
    if rate(layer) is not None:
        rate(layer).learning_rate = RATE
    # The second step has some of the keys alone.
    for part in (keys, keys[2:]):
        given = tf.reshape(tf.constant(part), [-1, *shape])
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(given, training=True) ** 2)
        weights = [keras_versions.variable(v) for v in layer.trainable_weights]
        differentiate(tape, loss, weights)
    if case == "distributed-dynamic":
        layer.tables["t"].score([7, 4], [-0.5, 1e-30])
    return model, layer


@functools.cache
def saved(case, folder):
    layer = model_of(case)[1]
    return tf.train.Checkpoint(layer=layer).write(f"{folder}/{case}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


def restored(case, path, complete=True):
    """A new layer's numbers, as a checkpoint has them."""
    layer = CASES[case][0]()
    layer.build([None])
    if rate(layer) is not None:
        assert rate(layer).learning_rate != RATE
    status = tf.train.Checkpoint(layer=layer).restore(path)
    if complete:
        status.assert_existing_objects_matched()
    return numbers(layer)


@pytest.mark.parametrize(
    "case", ["partial-dynamic", "distributed-dynamic", "dynamic-keys"]
)
def test_what_is_known_of_keys_is_shown_with_their_table(case, folder, capsys):
    found = numbers(model_of(case)[1])
    found = {name.rpartition("/")[2]: each for name, each in found.items()}
    assert list(found["keys"]) == [4, 7, 10**12]
    assert list(found["candidates"][:, 0]) == [-3]
    assert main(["inspect", saved(case, folder), "--json"]) == 0
    contents = json.loads(capsys.readouterr().out)
    [shown] = contents["tables"]
    assert shown["keys"] and shown["learning_rate"] == RATE
    assert {name: part["shape"] for name, part in shown["parts"].items()} == {
        name: list(found[name].shape)
        for name in ("keys", *COUNTERS)
        if name in found
    }
    assert ("score" in shown["parts"]) == (case == "distributed-dynamic")
    assert not contents["others"]
    assert contents["steps"] == {"layer": 2}
    assert main(["inspect", saved(case, folder)]) == 0
    text = capsys.readouterr().out
    assert re.search(r" candidates +\[1, 3\] +int64 +24 B[ -]*\n", text)
    assert "other variable" not in text
    assert f"Learning rate of '{shown['layer']}/{shown['name']}': 0.25" in text


def convert(capsys, *arguments):
    """Runs the command, which must succeed; returns what it says on stderr."""
    assert main(["convert", *map(str, arguments)]) == 0
    return capsys.readouterr().err


@on("keras:3", tier="more", when=lambda case: case in OF_KERAS)
@ALL
def test_checkpoints_stay_what_they_are(case, folder, tmp_path, capsys):
    expected = numbers(model_of(case)[1])
    err = convert(capsys, saved(case, folder), tmp_path / "new")
    # Only the small table's step isn't known: its layer has none.
    assert ("is not known" in err) == (case == "partial-small")
    assert "not taken over" not in err.replace("'save_counter'", "")
    assert_same(restored(case, str(tmp_path / "new")), expected)


@on("keras:3", tier="more")
def test_an_embedding_beside_a_layer_keeps_its_place(tmp_path, capsys):
    layer, plain = (
        model_of(case)[1] for case in ("partial-large", "embedding-ids")
    )
    objects = {"layer": layer, "plain": plain}
    path = tf.train.Checkpoint(**objects).write(str(tmp_path / "old"))
    err = convert(capsys, path, tmp_path / "new", "--layer", "model/emb")
    assert "not taken over" not in err
    new = tf.train.load_checkpoint(str(tmp_path / "new"))
    keys = {
        key.removesuffix("/.ATTRIBUTES/VARIABLE_VALUE")
        for key in new.get_variable_to_shape_map()
    }
    assert {"plain/embeddings", "model/emb/step"} <= keys
    assert "plain/step" not in keys


@on("keras:3", tier="more")
@pytest.mark.parametrize(
    "case, kind",
    [
        ("embedding-ids", ".weights.h5"),
        ("embedding-ids", ".h5"),
        ("partial-large", ".keras"),
        ("partial-small", ".weights.h5"),
        ("all2all-keys", ".weights.h5"),
    ],
)
def test_files_of_keras_have_tables_of_keras_alone(
    case, kind, tmp_path, capsys
):
    model, layer = model_of(case)
    path = f"{tmp_path}/model{kind}"
    (model.save_weights if "weights" in kind else model.save)(path)
    arguments = [path, str(tmp_path / "new"), "--layer", "layer"]
    if case == "embedding-ids" and kind == ".weights.h5":
        convert(capsys, *arguments)
        assert_same(restored(case, arguments[1]), numbers(layer))
        return
    assert main(["convert", *arguments]) == 2
    err = capsys.readouterr().err
    assert f"'{path}' " in err
    assert "save a tf.train.Checkpoint" in err
    assert ("older HDF5" in err) == (kind == ".h5")


@on("keras:3", tier="more", when=lambda case: case in OF_KERAS)
@pytest.mark.parametrize(
    "case",
    [
        "partial-small",
        "partial-dynamic",
        "distributed-static",
        "all2all-keys",
        "dynamic-strings",
    ],
)
def test_exported_models_become_checkpoints(case, tmp_path, capsys):
    model, layer = model_of(case)
    path = str(tmp_path / "exported")
    tfrs_embed.serving.export(model, path, progress=False)
    names = ["--layer", "layer"]
    if case.startswith("all2all"):
        names += ["--table", "table="]
    err = convert(capsys, path, tmp_path / "new", *names, "--step", 7)
    assert "neither slots nor a step" in err
    expected = {
        name: value
        for name, value in numbers(layer).items()
        if name.rpartition("/")[2] in ("keys", "parameters")
    }
    found = restored(case, str(tmp_path / "new"), complete=False)
    assert_same({name: found[name] for name in expected}, expected)


@on("keras:3", tier="more", when=lambda case: case in OF_KERAS)
@pytest.mark.parametrize(
    "case",
    ["partial-large", "partial-small", "all2all-rows", "embedding-ids"],
)
def test_saved_models_become_checkpoints(case, tmp_path, capsys):
    model, layer = model_of(case)
    tf.saved_model.save(model, str(tmp_path / "model"))
    convert(capsys, tmp_path / "model", tmp_path / "new", "--layer", "layer")
    expected = numbers(layer)
    found = restored(case, str(tmp_path / "new"))
    for each in (expected, found):
        each.pop("learning_rate", None)
    assert_same(found, expected)


def test_keys_that_are_none_are_refused(tmp_path, capsys):
    variables = {
        "parameters": tf.Variable(tf.zeros([3, 2])),
        "keys": tf.Variable([1, 2, 3]),
    }
    objects = tf.train.Checkpoint(**variables)
    for name in ("t", "tables", "layer"):
        objects = tf.train.Checkpoint(**{name: objects})
    path = objects.write(str(tmp_path / "old"))
    to = tmp_path / "to" / "new"
    assert main(["convert", path, str(to)]) == 1
    err = capsys.readouterr().err
    assert "'layer/tables/t/keys'" in err
    assert "is int32 of shape [3], not int64 of rank 1" in err
    assert not to.parent.exists()


def test_names_are_what_they_were(tmp_path, capsys):
    names = ["a.b", "c/d", "50%2E"]
    layer = layers.PartialTPUEmbedding(
        [FeatureConfig(n, TableConfig(n, ROWS, DIM)) for n in names],
        "adagrad",
        size_threshold=0,
    )
    inputs = [keras.Input([], dtype="int64") for _ in names]
    model = keras.Model(inputs, layer(inputs))
    path = f"{tmp_path}/model"
    tf.saved_model.save(model, path)
    assert main(["inspect", path, "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert sorted(table["name"] for table in tables) == sorted(names)


def test_variables_without_their_layers_are_refused(tmp_path, capsys):
    model, _ = model_of("partial-large")
    model.export(str(tmp_path / "model"))
    for command in (["inspect"], ["convert"]):
        to = [str(tmp_path / "new")] if command == ["convert"] else []
        assert main([*command, str(tmp_path / "model"), *to]) == 1
        err = capsys.readouterr().err
        assert "holds variables of tables" in err
        assert "tfrs_embed.serving.export" in err


def test_shards_alone_are_refused(tmp_path, capsys):
    # As SavedModels of sharded tables have them.
    objects = tf.Variable(tf.zeros([3, 2]))
    for name in ("shard_0", "parameters", "t", "tables", "layer"):
        objects = tf.train.Checkpoint(**{name: objects})
    path = objects.write(str(tmp_path / "old"))
    assert main(["inspect", path]) == 1
    err = capsys.readouterr().err
    assert "only shards of the table 'layer/tables/t'" in err
