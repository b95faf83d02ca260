"""Writes the checkpoints of this folder: python make.py [folder].

The files here were written in November 2026, before tables by key became one
kind of table. `test_old_checkpoints.py` restores them. Run it again, into a new
folder, to keep files of a later version too.

TFRS_EMBED_TEST_KERAS says which Keras's layers are written, as in the tests.
"""

import pathlib
import sys
import zipfile

if __name__ == "__main__":
    sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import numpy as np
import tensorflow as tf

import tfrs_embed
from fronts import NUMBER, keras, layers
from helpers import differentiate

DIM = 2
#: The keys of each training step.
STEPS = (
    [2**60, -5, 7, 7],
    [7, 3, 2**60, 11],
    [3, 7, -5, -(2**62)],
    [11, 13, 13, -(2**62)],
    [17, 17, 19, 7],
)


#: The files that were written once.
FILES = pathlib.Path(__file__).parent / f"keras{NUMBER}"


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


LAYERS = {"all2all": all2all, "dynamic": dynamic}


def inputs(kind, keys):
    """Keys as the layer of a kind takes them."""
    keys = tf.constant(keys, tf.int64)
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


def written(kind, name):
    """What a file holds: the values that were written beside it."""
    with np.load(FILES / kind / f"{name}.npz") as file:
        return dict(file)


def replicas():
    """Two replicas in this process."""
    return tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])


def compress(path):
    """Compresses what is in a .keras file, HDF5's zeros above all."""
    with zipfile.ZipFile(path) as file:
        contents = {name: file.read(name) for name in file.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in contents.items():
            file.writestr(name, content)


def write(folder, kind):
    """Writes the files of one kind of layer."""
    folder.mkdir(parents=True)
    model, layer = model_of(kind)
    for keys in STEPS:
        train(layer, kind, keys)
    np.savez(folder / "one.npz", **values(layer, kind))
    tf.train.Checkpoint(layer=layer).write(str(folder / "one"))
    model.save(str(folder / "one.keras"))
    compress(folder / "one.keras")
    if NUMBER == 3:
        return  # Its layers are trained by replicas in tf_keras's tests.
    strategy = replicas()
    with strategy.scope():
        layer = LAYERS[kind]()
    step = tf.function(lambda keys: strategy.run(train, (layer, kind, keys)))
    for keys in STEPS:
        step(keys)
    np.savez(folder / "two.npz", **values(layer, kind))
    tf.train.Checkpoint(layer=layer).write(str(folder / "two"))


if __name__ == "__main__":
    cpu = tf.config.list_physical_devices("CPU")[0]
    devices = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(cpu, devices)
    here = pathlib.Path(*(sys.argv[1:2] or [pathlib.Path(__file__).parent]))
    for each in LAYERS:
        write(here / f"keras{NUMBER}" / each, each)
