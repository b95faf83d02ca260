"""Writes the checkpoints of a release, of each kind: python make.py.

`test_old_checkpoints.py` restores them with all later code. For a new release
whose files differ, set `RELEASE` and run this twice, with the environment
variable TFRS_EMBED_TEST_KERAS set to 2, and then to 3.
"""

import pathlib
import sys
import zipfile

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import numpy as np
import tensorflow as tf

import tfrs_embed
from keras_under_test import NUMBER, keras, layers
from tfrs_embed.checkpoint import DeltaManager
from training_helpers import differentiate

DIM = 2
#: The keys of each training step.
STEPS = (
    [2**60, -5, 7, 7],
    [7, 3, 2**60, 11],
    [3, 7, -5, -(2**62)],
    [11, 13, 13, -(2**62)],
    [17, 17, 19, 7],
)


RELEASE = "0.1.0"
#: The files that were written once.
FILES = pathlib.Path(__file__).parent / RELEASE


def initializer():
    return keras.initializers.RandomNormal(seed=5)


def all2all():
    """A layer of keys that stay."""
    return layers.All2AllDenseEmbedding(
        10,
        DIM,
        2,
        2,
        embedding_initializer=initializer(),
        optimizer="adagrad",
        name="sok",
    )


def ids():
    """A layer of rows by number."""
    table = tfrs_embed.TableConfig("items", 6, DIM, initializer())
    return layers.PartialTPUEmbedding(
        {"item": tfrs_embed.FeatureConfig("item", table)},
        "adam",
        size_threshold=0,
        name="partial",
    )


def dynamic():
    """A layer of keys that are admitted and evicted."""
    keys = tfrs_embed.DynamicKeys(
        admission=tfrs_embed.FrequencyAdmission(2),
        eviction="lfu",
        candidates=16,
    )
    table = tfrs_embed.TableConfig("items", 6, DIM, initializer(), keys=keys)
    return layers.PartialTPUEmbedding(
        {"item": tfrs_embed.FeatureConfig("item", table)},
        "adagrad",
        name="partial",
    )


LAYERS = {"all2all": all2all, "dynamic": dynamic, "ids": ids}
#: By kind, the last checkpoint: a delta of the one before, or a full one.
LAST = {"all2all": "ckpt-1", "dynamic": "ckpt-2", "ids": "ckpt-1"}


def inputs(kind, keys):
    """Keys as the layer of a kind takes them."""
    keys = tf.constant(keys, tf.int64)
    if kind == "ids":
        keys %= 6
    if kind == "all2all":
        return tf.reshape(keys, [-1, 2, 2])
    return {"item": keys}


def model_of(kind):
    """A Keras model with a layer, and the layer."""
    layer = LAYERS[kind]()
    if kind == "all2all":
        given = keras.Input([2, 2], dtype=tf.int64)
        return keras.Model(given, layer(given)), layer
    given = {"item": keras.Input([], dtype=tf.int64, name="item")}
    return keras.Model(given, layer(given)["item"]), layer


def train(layer, kind, keys):
    """Trains once; every vector's gradient is 1."""
    with tf.GradientTape() as tape:
        vectors = layer(inputs(kind, keys), training=True)
        vectors = vectors if kind == "all2all" else vectors["item"]
        loss = tf.reduce_sum(vectors)
    differentiate(tape, loss, layer.trainable_variables)


def values(layer, kind):
    """What a layer holds: its table's variables, and the step."""
    table = layer.table if kind == "all2all" else layer.tables["items"]
    found = {name: v.numpy() for name, v in table.variables.items()}
    return {**found, "step": layer.step.numpy()}


def written(kind):
    """What the last files hold: the values that were written beside them."""
    with np.load(FILES / kind / "values.npz") as file:
        return dict(file)


def compress(path):
    """Compresses what is in a .keras file, HDF5's zeros above all."""
    with zipfile.ZipFile(path) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in contents.items():
            file.writestr(name, content)


def write(kind):
    """Writes the files of one kind of layer."""
    folder = FILES / kind
    model, layer = model_of(kind)
    if NUMBER == 2:
        checkpoint = tf.train.Checkpoint(layer=layer)
        manager = DeltaManager(checkpoint, folder, background=False)
        for number, keys in enumerate(STEPS, 1):
            train(layer, kind, keys)
            if number == 3 and LAST[kind] == "ckpt-2":
                manager.save()
        manager.save()
        for file in (".delta_manager.lock", "checkpoint"):
            (folder / file).unlink()
        np.savez_compressed(folder / "values.npz", **values(layer, kind))
    else:
        path = str(folder / LAST[kind])
        tf.train.Checkpoint(layer=layer).read(path).assert_consumed()
    path = folder / f"keras{NUMBER}.keras"
    model.save(str(path))
    compress(path)


if __name__ == "__main__":
    for each in LAYERS:
        write(each)
