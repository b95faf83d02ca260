"""keras_rs's own configurations and saved models, in layers of both."""

import json
import os
import subprocess
import sys
import warnings
import zipfile

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras
import tfrs_embed.keras3

import tfrs_embed
from process_tiers import nightly
from tfrs_embed.compat import keras_versions
from training_helpers import change_byte
from training_helpers import checkpoint_command as main

pytestmark = pytest.mark.tools

keras_rs = pytest.importorskip("keras_rs")

TableConfig = keras_rs.layers.TableConfig
FeatureConfig = keras_rs.layers.FeatureConfig

FRONTS = {"tf_keras": tfrs_embed, "Keras 3": tfrs_embed.keras3}
KERAS = {"tf_keras": tf_keras, "Keras 3": keras}
BOTH_FRONTS = pytest.mark.parametrize("front", FRONTS)
IDS = np.array([[1, 2, 3], [4, 5, 6]])


def feature(table, name="ids"):
    return FeatureConfig(name, table, (2, 3), (2, table.embedding_dim))


def distributed(front, configs, **options):
    return FRONTS[front].DistributedEmbedding(configs, **options)


def partial(front, configs, **options):
    return FRONTS[front].PartialTPUEmbedding(configs, "adam", **options)


def built(layer, ids=IDS):
    layer(ids)
    return layer


def stored(layer):
    """What a layer's config says of its tables and features."""
    config = layer.get_config()
    return config.get("feature_configs") or config["feature_config"]


BOTH_LAYERS = pytest.mark.parametrize("make", [distributed, partial])


@BOTH_FRONTS
@BOTH_LAYERS
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_its_configs_say_what_ours_do(front, make, combiner):
    initializer = keras.initializers.RandomUniform(seed=1)
    settings = {"initializer": initializer, "combiner": combiner}
    theirs = make(front, feature(TableConfig("t", 10, 4, **settings)))
    table = tfrs_embed.TableConfig("t", 10, 4, **settings)
    ours = make(front, tfrs_embed.FeatureConfig("ids", table, (2, 3), (2, 4)))
    np.testing.assert_array_equal(theirs(IDS), ours(IDS))
    theirs, ours = stored(theirs), stored(ours)
    # What tables of keras_rs have by default.
    assert theirs.pop("optimizers") == ["adam"]
    assert ours.pop("optimizers") == [None]
    assert theirs == ours


@BOTH_FRONTS
@BOTH_LAYERS
def test_one_table_object_is_one_table(front, make):
    shared, other = TableConfig("shared", 10, 4), TableConfig("other", 10, 4)
    layer = make(
        front,
        {"a": feature(shared), "b": (feature(shared), feature(other))},
    )
    a, (b, c) = built(layer, {"a": IDS, "b": (IDS, IDS)})(
        {"a": IDS, "b": (IDS, IDS)}
    ).values()
    np.testing.assert_array_equal(a, b)
    # Of one shape, and of keras_rs's one initializer for all.
    assert not np.allclose(a, c)
    assert list(layer.embedding_tables) == ["shared", "other"]


@BOTH_FRONTS
def test_its_features_and_ours_may_share_a_table(front):
    table = TableConfig("t", 10, 4)
    layer = distributed(
        front, [feature(table), tfrs_embed.FeatureConfig("more", table)]
    )
    first, second = layer([IDS, IDS])
    np.testing.assert_array_equal(first, second)
    layer = distributed(front, {"ids": feature(table), "more": table})
    np.testing.assert_array_equal(*layer({"ids": IDS, "more": IDS}).values())
    own = tfrs_embed.TableConfig("own", 10, 4)
    layer = distributed(
        front, [feature(own), tfrs_embed.FeatureConfig("more", own)]
    )
    first, second = layer([IDS, IDS])
    np.testing.assert_array_equal(first, second)


@BOTH_FRONTS
@BOTH_LAYERS
def test_a_layer_made_of_its_configs_is_restored_from_its_config(front, make):
    tables = [
        TableConfig("default", 10, 4),
        TableConfig("named", 10, 4, initializer="uniform", optimizer="sgd"),
    ]
    layer = make(front, {table.name: feature(table) for table in tables})
    config = json.loads(json.dumps(layer.get_config()))
    restored = type(layer).from_config(config)
    assert restored.get_config() == layer.get_config()
    [first, second] = restored({"default": IDS, "named": IDS}).values()
    assert np.any(first) and np.any(second)


@nightly(lambda front: front != "Keras 3")
@BOTH_FRONTS
def test_a_saved_model_needs_no_keras_rs(front, tmp_path):
    package = KERAS[front]
    layer = distributed(front, feature(TableConfig("t", 10, 4)))
    ids = package.Input([3], dtype="int64")
    model = package.Model(ids, layer(ids))
    path = tmp_path / "model.keras"
    model.save(path)
    np.save(tmp_path / "outputs.npy", model(IDS))
    script = f"""
import sys
import numpy as np
import {package.__name__} as package
import {FRONTS[front].__name__}
model = package.models.load_model({str(path)!r})
outputs = np.load({str(tmp_path / "outputs.npy")!r})
np.testing.assert_array_equal(model(np.array({IDS.tolist()})), outputs)
assert "keras_rs" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True)


@BOTH_FRONTS
def test_its_tables_train_by_their_own_optimizers(front):
    rates = {"slow": 0.0, "fast": 0.5}
    sgd = tf.tpu.experimental.embedding.SGD
    if front == "Keras 3":
        sgd = keras.optimizers.SGD
    layer = distributed(
        front,
        {
            name: feature(TableConfig(name, 10, 4, optimizer=sgd(rate)))
            for name, rate in rates.items()
        },
    )
    ids = {name: IDS for name in rates}
    before = {
        n: t.numpy() for n, t in built(layer, ids).embedding_tables.items()
    }
    with tf.GradientTape() as tape:
        loss = tf.add_n([tf.reduce_sum(o) for o in layer(ids).values()])
    variables = [keras_versions.variable(v) for v in layer.trainable_weights]
    tape.gradient(loss, variables)
    after = {n: t.numpy() for n, t in layer.embedding_tables.items()}
    np.testing.assert_array_equal(after["slow"], before["slow"])
    # Each id is a third of a mean.
    change = (after["fast"] - before["fast"])[1:7]
    np.testing.assert_allclose(change, np.full((6, 4), -0.5 / 3), rtol=1e-5)


def test_keras_3s_optimizers_train_no_table_of_tf_keras():
    table = TableConfig("t", 10, 4, optimizer=keras.optimizers.Adagrad(0.1))
    with pytest.raises(TypeError, match=r"Table 't'.* one is Keras 3's"):
        distributed("tf_keras", feature(table))
    distributed("Keras 3", feature(table))


@BOTH_FRONTS
@pytest.mark.parametrize(
    "change, message",
    [
        ({"placement": "tensorcore"}, "Table 't': placement .*'tensorcore'"),
        ({"combiner": "max"}, "Table 't': combiner .*'max'"),
        ({"vocabulary_size": 0}, "Table 't': vocabulary_size .* 0"),
        ({"optimizer": "zzz"}, "Table 't': .*'zzz'"),
        ({"name": ""}, "table's name .*''"),
        ({"placement": "sparsecore"}, "'t'.*sparsecore"),
    ],
)
def test_its_settings_are_checked_as_ours(front, change, message):
    arguments = {"name": "t", "vocabulary_size": 10, "embedding_dim": 4}
    table = TableConfig(**{**arguments, **change})
    with pytest.raises((TypeError, ValueError), match=message):
        distributed(front, feature(table))


@BOTH_FRONTS
def test_a_feature_is_checked_as_ours(front):
    table = TableConfig("t", 10, 4)
    with pytest.raises(ValueError, match=r"Feature 'a': output_shape .*\[2, 5"):
        distributed(front, FeatureConfig("a", table, (2, 3), (2, 5)))
    with pytest.raises(TypeError, match=r"Feature '0': table must .* got str"):
        distributed(front, [FeatureConfig("a", "t", (2, 3), (2, 4))])
    twice = [feature(TableConfig("t", 10, 4)) for _ in range(2)]
    with pytest.raises(ValueError, match="different tables are named 't'"):
        distributed(front, twice)


@BOTH_FRONTS
def test_later_changes_of_its_configs_change_no_layer(front):
    table = TableConfig("t", 10, 4)
    layer = distributed(front, feature(table))
    table.combiner = "sum"
    [table] = stored(layer)["tables"]
    assert table["combiner"] == "mean"


def test_an_initializer_of_the_other_keras_is_restored():
    for front, other in (("tf_keras", keras), ("Keras 3", tf_keras)):
        table = tfrs_embed.TableConfig(
            "t", 10, 4, other.initializers.VarianceScaling(seed=3)
        )
        layer = distributed(front, tfrs_embed.FeatureConfig("ids", table))
        config = json.loads(json.dumps(layer.get_config()))
        restored = type(layer).from_config(config)
        np.testing.assert_array_equal(restored([1, 2]), layer([1, 2]))
        assert restored.get_config() == layer.get_config()


# Its saved models, which the converter makes checkpoints of.

MOVIES, USERS = (50, 4), (30, 8)
# No id twice: Keras 3's optimizers would take its gradients one by one.
INPUTS = {
    "movie": np.array([3, 7, 5, 49]),
    "history": np.array([[8, 9], [1, 0], [2, 10], [48, 20]]),
    "user": np.array([0, 29, 4, 5]),
}
TARGETS = np.full([4, 1], 5, np.float32)


def make_model(layer, optimizer=None, name="embeddings"):
    """A model of Keras 3 with a layer of keras_rs, or ours in its place."""
    movies = TableConfig("movies", *MOVIES, optimizer=optimizer or "adam")
    users = TableConfig("users", *USERS, optimizer=optimizer or "adam")
    configs = {
        "movie": FeatureConfig("movie", movies, (4,), (4, 4)),
        "history": FeatureConfig("history", movies, (4, 2), (4, 4)),
        "user": FeatureConfig("user", users, (4,), (4, 8)),
    }
    ids = {
        key: keras.Input(value.shape[1:], dtype="int64", name=key)
        for key, value in INPUTS.items()
    }
    vectors = layer(configs, name=name)(ids)
    rating = keras.layers.Dense(1)
    joined = keras.layers.Concatenate()([vectors[key] for key in INPUTS])
    return keras.Model(ids, rating(joined))


def trained_by_keras_rs(optimizer, steps=3):
    model = make_model(keras_rs.layers.DistributedEmbedding)
    model.compile(optimizer, "mse")
    for _ in range(steps):
        model.train_on_batch(INPUTS, TARGETS)
    return model


def tables_of_keras_rs(model, name="embeddings"):
    tables = model.get_layer(name).get_embedding_tables()
    return {name: table.numpy() for name, table in tables.items()}


def test_tables_of_the_models_adam_have_the_losses_of_keras_rs():
    """Off TPUs keras_rs reads no optimizer of a table, "adam" by default."""
    theirs = make_model(keras_rs.layers.DistributedEmbedding)
    tables, weights = (
        tables_of_keras_rs(theirs),
        theirs.layers[-1].get_weights(),
    )
    losses = []
    for model, of_tables in (
        (theirs, None),
        (None, keras.optimizers.Adam(0.1)),
        (None, None),
    ):
        if model is None:
            model = make_model(
                tfrs_embed.keras3.DistributedEmbedding, of_tables
            )
            model.get_layer("embeddings").load_tables(tables)
            model.layers[-1].set_weights(weights)
        model.compile(keras.optimizers.Adam(0.1), "mse")
        losses.append(
            [float(model.train_on_batch(INPUTS, TARGETS)) for _ in range(5)]
        )
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert losses[2][-1] > 1.5 * losses[0][-1]


def assert_tables(layer, expected):
    found = {n: t.numpy() for n, t in layer.embedding_tables.items()}
    assert list(found) == list(expected)
    for name, table in expected.items():
        np.testing.assert_array_equal(found[name], table, err_msg=name)


def save_to(path, model, kind):
    """Saves a model; returns the path that the converter is given."""
    if kind == "SavedModel":
        tf.saved_model.save(model, str(path))
        return str(path / "variables" / "variables")
    if kind == "checkpoint":
        return tf.train.Checkpoint(model).save(str(path))
    file = f"{path}{kind}"
    (model.save if kind == ".keras" else model.save_weights)(file)
    return file


KINDS = [".keras", ".weights.h5", "checkpoint", "SavedModel"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_of_keras_rs_is_restored(kind, tmp_path, capsys):
    trained = trained_by_keras_rs("adam")
    old = save_to(tmp_path / "old", trained, kind)
    new = str(tmp_path / "new")
    assert main(["convert", old, new]) == 0
    err = capsys.readouterr().err
    assert ("Slots of Keras's optimizers" in err) == (kind in KINDS[:2])

    model = make_model(tfrs_embed.keras3.DistributedEmbedding)
    if kind in KINDS[:2]:  # All but the tables.
        with pytest.warns(UserWarning, match="could not be loaded"):
            model.load_weights(old, skip_mismatch=True)
    else:
        model.layers[-1].set_weights(trained.layers[-1].get_weights())
    layer = model.get_layer("embeddings")
    tf.train.Checkpoint(embeddings=layer).restore(new).expect_partial()
    assert_tables(layer, tables_of_keras_rs(trained))
    np.testing.assert_allclose(model(INPUTS), trained(INPUTS), rtol=1e-6)


@BOTH_FRONTS
def test_its_tables_go_to_layers_of_both_kerases(front, tmp_path):
    trained = trained_by_keras_rs("sgd")
    old = save_to(tmp_path / "old", trained, ".keras")
    new = str(tmp_path / "new")
    names = ["--layer", "a/b", "--table", "movies=films"]
    assert main(["convert", old, new, *names]) == 0
    layer = FRONTS[front].DistributedEmbedding(
        [
            tfrs_embed.FeatureConfig(name, tfrs_embed.TableConfig(name, *shape))
            for name, shape in (("films", MOVIES), ("users", USERS))
        ]
    )
    root = tf.train.Checkpoint(a=tf.train.Checkpoint(b=layer))
    root.restore(new).expect_partial()
    layer([[0], [0]])
    tables = tables_of_keras_rs(trained)
    assert_tables(layer, {"films": tables["movies"], "users": tables["users"]})


@nightly(
    lambda optimizer, kind: (
        (kind == "checkpoint") == (optimizer in ("Adagrad", "RMSprop"))
    )
)
@pytest.mark.parametrize("kind", ["checkpoint", "SavedModel"])
@pytest.mark.parametrize(
    "optimizer, settings, slots",
    [
        ("Adam", {}, {"momenta": "momentum", "velocities": "velocity"}),
        ("Adagrad", {}, {"accumulators": "accumulator"}),
        ("Ftrl", {}, {"accumulators": "accumulator", "linears": "linear"}),
        ("RMSprop", {}, {"velocities": "velocity"}),
        ("SGD", {"momentum": 0.8}, {"momenta": "momentum"}),
        ("SGD", {}, {}),
    ],
)
def test_training_goes_on_where_keras_rs_left_off(
    optimizer, settings, slots, kind, tmp_path
):
    def make_optimizer():
        return getattr(keras.optimizers, optimizer)(0.1, **settings)

    trained = trained_by_keras_rs(make_optimizer())
    old = save_to(tmp_path / "old", trained, kind)
    new = str(tmp_path / "new")
    assert main(["convert", old, new]) == 0

    model = make_model(tfrs_embed.keras3.DistributedEmbedding, make_optimizer())
    model.compile("sgd", "mse")
    model.layers[-1].set_weights(trained.layers[-1].get_weights())
    layer = model.get_layer("embeddings")
    tf.train.Checkpoint(embeddings=layer).restore(new).expect_partial()
    assert int(layer.step) == 3
    theirs = {v.name: v for v in trained.optimizer.variables}
    for name in ("movies", "users"):
        found = layer.tables[name].slots
        assert set(found) == set(slots)
        for slot, value in found.items():
            other = theirs[f"embeddings_{name}_embeddings_{slots[slot]}"]
            np.testing.assert_array_equal(value, other, err_msg=slot)
    for each in (model, trained):
        each.train_on_batch(INPUTS, TARGETS)
    for name, table in tables_of_keras_rs(trained).items():
        np.testing.assert_allclose(
            layer.embedding_tables[name], table, rtol=1e-4, atol=1e-6
        )


def test_layers_of_one_name_are_known_by_their_place(tmp_path, capsys):
    layer = keras_rs.layers.DistributedEmbedding
    inner = [make_model(layer), make_model(layer, name="embeddings")]
    outer = keras.Model(
        inner[0].inputs,
        [
            model(dict(zip(INPUTS, inner[0].inputs, strict=True)))
            for model in inner
        ],
    )
    path = save_to(tmp_path / "model", outer, ".weights.h5")
    assert main(["inspect", path, "--json"]) == 0
    tables = json.loads(capsys.readouterr().out)["tables"]
    assert len(tables) == 4
    assert len({(table["layer"], table["name"]) for table in tables}) == 4
    shapes = {table["name"]: (table["rows"], table["dim"]) for table in tables}
    assert shapes == {"movies": MOVIES, "users": USERS}


@BOTH_FRONTS
@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_of_keras_becomes_a_table(front, kind, tmp_path, capsys):
    package = KERAS[front]
    ids = package.Input([2], dtype="int64")
    embedding = package.layers.Embedding(9, 4)
    vectors = package.layers.Flatten()(embedding(ids))
    model = package.Model(ids, package.layers.Dense(1)(vectors))
    model.compile("adam", "mse")
    model.train_on_batch(np.array([[1, 2]]), np.ones([1, 1]))
    path = save_to(tmp_path / "old", model, kind)
    assert main(["inspect", path, "--json"]) == 0
    [table] = json.loads(capsys.readouterr().out)["tables"]
    assert (table["rows"], table["dim"], table["name"]) == (9, 4, "")
    new = str(tmp_path / "new")
    names = ["--table", f"{table['layer']}=movies", "--layer", "emb"]
    assert main(["convert", path, new, *names]) == 0
    has_slots = kind in KINDS[2:]
    err = capsys.readouterr().err
    assert ("Slots of Keras's optimizers" in err) != has_slots

    config = tfrs_embed.TableConfig("movies", 9, 4)
    layer = FRONTS[front].PartialTPUEmbedding(
        tfrs_embed.FeatureConfig("x", config), "adam", size_threshold=0
    )
    tf.train.Checkpoint(emb=layer).restore(new).expect_partial()
    expected = keras_versions.variable(embedding.embeddings).numpy()
    assert_tables(built(layer), {"movies": expected})
    assert int(layer.step) == has_slots
    slots = {k: v.numpy() for k, v in layer.tables["movies"].slots.items()}
    if has_slots:
        optimizer = model.optimizer
        expected = {
            "momenta": optimizer._momentums[0],
            "velocities": optimizer._velocities[0],
        }
        assert_slots(slots, expected)
        assert slots["momenta"].any()
    else:
        assert not any(slot.any() for slot in slots.values())


def assert_slots(found, expected):
    assert set(found) == set(expected)
    for name, slot in expected.items():
        slot = keras_versions.variable(slot).numpy()
        np.testing.assert_array_equal(found[name], slot, err_msg=name)


def test_a_checkpoint_without_the_optimizer_has_no_tables(tmp_path, capsys):
    # TensorFlow doesn't see that the layer holds them.
    model = make_model(keras_rs.layers.DistributedEmbedding)
    path = save_to(tmp_path / "old", model, "checkpoint")
    assert not any("emb" in name for name, _ in tf.train.list_variables(path))
    assert main(["convert", path, str(tmp_path / "new")]) == 2
    assert "no tables of" in capsys.readouterr().err


@pytest.mark.parametrize("kind", [".keras", ".weights.h5"])
def test_a_damaged_file_is_refused(kind, tmp_path, capsys):
    path = save_to(tmp_path / "old", trained_by_keras_rs("sgd"), kind)
    size = os.path.getsize(path)
    if kind == ".keras":
        change_byte(path, size // 2)
    else:
        os.truncate(path, size // 2)
    assert main(["convert", path, str(tmp_path / "new")]) == 1
    assert path in capsys.readouterr().err
    assert not list(tmp_path.glob("new*"))


def test_an_archive_of_something_else_is_refused(tmp_path, capsys):
    path = str(tmp_path / "other.keras")
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("readme", "nothing")
    assert main(["convert", path, str(tmp_path / "new")]) == 1
    assert (
        f"'{path}' can't be read: it has no 'model.w" in capsys.readouterr().err
    )


# A model as keras_rs's tutorial has it.


@keras.saving.register_keras_serializable("test_keras_rs")
class Ranking(keras.Model):
    def __init__(self, embeddings, **kwargs):
        super().__init__(**kwargs)
        self.embeddings = embeddings
        self.rating = keras.layers.Dense(1)

    def call(self, ids):
        vectors = keras.tree.flatten(self.embeddings(ids))
        return self.rating(keras.ops.concatenate(vectors, axis=1))

    def get_config(self):
        layer = keras.saving.serialize_keras_object(self.embeddings)
        return {"embeddings": layer}

    @classmethod
    def from_config(cls, config):
        return cls(keras.saving.deserialize_keras_object(config["embeddings"]))


class Rating(keras.Model):
    """With a layer of Keras's, whose variables go by the same names."""

    def __init__(self, name=None):
        super().__init__(name=name)
        self.embeddings = keras_rs.layers.DistributedEmbedding(
            {
                "movie": feature(TableConfig("movies", *MOVIES)),
                "user": feature(TableConfig("users_2", *USERS)),
            },
            name=name and "vectors",
        )
        self.plain = keras.layers.Embedding(9, 4)
        self.rating = keras.layers.Dense(1)

    def call(self, ids):
        vectors = keras.tree.flatten(self.embeddings(ids))
        vectors.append(keras.ops.mean(self.plain(ids["user"]), 1))
        return self.rating(keras.ops.concatenate(vectors, axis=1))


@pytest.mark.parametrize(
    "name, optimizer, expected",
    [
        # The slots' names tell the tables'.
        (None, "adam", ["movies", "users_2"]),
        # Not where the layer's name ends, which is not one of Keras's.
        ("mine", "adam", ["vectors_movies", "vectors_users_2"]),
        # Without slots there are numbers.
        (None, "sgd", ["0", "1"]),
    ],
)
def test_models_of_a_class_of_their_own_are_converted(
    name, optimizer, expected, tmp_path, capsys
):
    model = Rating(name)
    model.compile(optimizer, "mse")
    model.train_on_batch({"movie": IDS, "user": IDS}, np.ones([2, 1]))
    path = save_to(tmp_path / "old", model, "checkpoint")
    assert main(["inspect", path, "--json"]) == 0
    contents = json.loads(capsys.readouterr().out)
    found = [t for t in contents["tables"] if t["layer"] != "plain"]
    assert [table["name"] for table in found] == expected
    noted = " ".join(contents["notes"])
    assert ("its position among" in noted) == (optimizer == "sgd")
    assert ("is its layer's name and its own" in noted) == bool(name)
    [layer] = {table["layer"] for table in found}
    assert ("distributed_embedding" in layer) == (expected[0] == "movies")

    names = ["--layer", f"{layer}=embeddings", "--layer", "plain=plain"]
    for old, new in zip(expected, ("movies", "users"), strict=True):
        names += ["--table", f"{old}={new}"]
    assert main(["convert", path, str(tmp_path / "new"), *names]) == 0
    ours = distributed(
        "Keras 3",
        [
            tfrs_embed.FeatureConfig(n, tfrs_embed.TableConfig(n, *shape))
            for n, shape in (("movies", MOVIES), ("users", USERS))
        ],
    )
    root = tf.train.Checkpoint(embeddings=built(ours, [IDS, IDS]))
    root.restore(str(tmp_path / "new")).expect_partial()
    tables = model.embeddings.get_embedding_tables()
    assert_tables(
        ours,
        {
            "movies": tables["movies"].numpy(),
            "users": tables["users_2"].numpy(),
        },
    )
    assert int(ours.step) == 1


@pytest.mark.parametrize("weighted", [None, False, True])
def test_a_models_own_class_is_built_of_shapes_as_it_is_loaded(
    weighted, tmp_path
):
    layer = distributed(
        "Keras 3",
        {
            "movie": feature(TableConfig("movies", *MOVIES)),
            "user": feature(TableConfig("users", *USERS)),
        },
    )
    inputs = {"movie": IDS, "user": IDS + 1}
    if weighted is not None:
        weights = {key: np.full([2, 3], 0.5) for key in inputs}
        inputs = layer.preprocess(inputs, weights if weighted else None)
    model = Ranking(layer)
    expected = model(inputs)
    path = tmp_path / "model.keras"
    model.save(path)
    with warnings.catch_warnings():
        # Keras only warns of what it can't build or load.
        warnings.simplefilter("error")
        loaded = keras.models.load_model(path)
    np.testing.assert_array_equal(loaded(inputs), expected)


def test_floats_are_ids_of_small_tables():
    layer = distributed("Keras 3", feature(TableConfig("t", 10, 4)))
    floats = keras.Input([3])
    model = keras.Model(floats, layer(floats))
    np.testing.assert_array_equal(model(IDS.astype("float32")), layer(IDS))
    large = distributed("Keras 3", feature(TableConfig("t", 2**24 + 1, 4)))
    with pytest.raises(TypeError, match=r"got float32.*dtype='int64'"):
        large(floats)
