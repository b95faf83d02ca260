"""All2AllDenseEmbedding, and its reference: keys of any value have rows."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from conformance.descriptors import OPTIMIZERS, fresh
from dynamic_layers import normal
from keras_under_test import keras, layers
from reference import Feature, Reference, Table
from training_helpers import assert_same, differentiate, state

DIM, SLOTS, NNZ, CAPACITY = 3, 2, 4, 12
# What all shards together hold in tests with several replicas.
ROWS = 24
BOTH = pytest.mark.parametrize("hashed", [True, False], ids=["hash", "rows"])
GRAPH = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])


def initializer():
    return keras.initializers.RandomNormal(seed=5)


def initial(key):
    """A key's row before it was trained."""
    return normal(5, key, DIM)


def make(hashed=True, capacity=CAPACITY, optimizer="sgd", **kwargs):
    kwargs.setdefault("embedding_initializer", initializer())
    return layers.All2AllDenseEmbedding(
        capacity,
        DIM,
        SLOTS,
        NNZ,
        use_hashtable=hashed,
        optimizer=optimizer,
        **kwargs,
    )


class Keyed:
    """The numpy reference, whose rows are in the order of the keys' first use.

    A key's initial row is made of the key, or is that of the number it is.
    """

    def __init__(self, name, hashed=True, rows=CAPACITY):
        given, rule, settings, options = OPTIMIZERS[name]
        self.optimizer = fresh(given)
        self.hashed = hashed
        self.row = {} if hashed else {k: k for k in range(rows)}
        table = Table(
            initializer()((rows, DIM)).numpy(),
            "sum",
            rule,
            settings,
            lambda step: 0.3,
            options=options,
        )
        self.reference = Reference({"keys": Feature("x")}, {"x": table})

    def add(self, keys):
        """Gives rows to new keys."""
        if not self.hashed:
            return
        rows = self.reference.tables["x"].rows
        for key in keys.ravel().tolist():
            if key not in self.row:
                self.row[key] = len(self.row)
                rows[self.row[key]] = initial(key)

    def assert_output(self, keys, output):
        assert output.shape == (*keys.shape, DIM)
        if keys.size:
            expected = self.reference.lookup(self.inputs(keys), {"keys": None})
            np.testing.assert_allclose(
                output, expected["keys"], rtol=2e-5, atol=2e-6
            )

    def inputs(self, keys):
        rows = [self.row[key] for key in keys.ravel().tolist()]
        return {"keys": np.array(rows, np.int64).reshape(keys.shape)}

    def update(self, batches):
        """Trains with all replicas' keys and gradients."""
        keys = np.concatenate([k.ravel() for k, _ in batches])
        gradients = np.concatenate([g.reshape(-1, DIM) for _, g in batches])
        sums = {}
        if keys.size:
            sums = self.reference.row_gradients(
                self.inputs(keys), {"keys": None}, {"keys": gradients}
            )
        self.reference.update(sums)

    def assert_table(self, layer):
        """Compares rows and slots of all keys."""
        table, found = self.reference.tables["x"], dict(layer.table.variables)
        keys = sorted(self.row)
        if "keys" in found:
            np.testing.assert_array_equal(found.pop("keys").numpy(), keys)
        rows = [self.row[key] for key in keys]
        expected = {"parameters": table.rows, **table.slots}
        assert sorted(found) == sorted(expected)
        for name, value in expected.items():
            np.testing.assert_allclose(
                found[name].numpy(),
                value[rows],
                rtol=2e-4,
                atol=2e-5,
                err_msg=name,
            )


def draw(rng, batch=5, low=0, high=CAPACITY):
    return rng.integers(low, high, (batch, SLOTS, NNZ))


def train(layer, keys, gradients=1.0, training=True):
    with tf.GradientTape() as tape:
        output = layer(keys, training=training)
        loss = tf.reduce_sum(tf.cast(output, tf.float32) * gradients)
    differentiate(tape, loss, layer.trainable_variables)
    return output


def trained(**kwargs):
    layer = make(**kwargs)
    train(layer, tf.constant(draw(np.random.default_rng(0), high=CAPACITY - 2)))
    return layer


def make_model(hashed=True, **kwargs):
    inputs = keras.Input([SLOTS, NNZ], dtype=tf.int64)
    layer = make(hashed, **kwargs)
    vectors = layer(inputs)
    assert vectors.shape == layer.compute_output_shape(inputs.shape)
    dense = keras.layers.Dense(
        1, kernel_initializer=keras.initializers.GlorotUniform(seed=4)
    )
    model = keras.Model(inputs, dense(keras.layers.Flatten()(vectors)))
    model.compile(keras.optimizers.SGD(0.1), "mse")
    return model, layer


def make_data():
    keys = draw(np.random.default_rng(3), batch=10, high=CAPACITY - 3)
    return tf.constant(keys), tf.reduce_sum(tf.cast(keys, tf.float32), [1, 2])


def checkpoint_layer(world, hashed):
    """A layer whose checkpoints replicas of any number can read."""
    return make(hashed, ROWS if hashed else ROWS // world, "adagrad")


def write_checkpoint(layer, folder, world):
    """Writes a checkpoint, and beside it what should be in it."""
    hashed = "keys" in layer.table.variables
    path = folder / f"{'hash' if hashed else 'rows'}-{world}"
    if not path.exists():
        path.mkdir()
        np.savez(path / "expected.npz", **state(layer))
        tf.train.Checkpoint(layer=layer).write(str(path / "ckpt"))
    return path


def check_checkpoints(folder, hashed, world, scope=contextlib.nullcontext):
    """Asserts that the checkpoints there hold what was written."""
    written = sorted(folder.glob("hash-*" if hashed else "rows-*"))
    for path in written:
        with scope():
            layer = checkpoint_layer(world, hashed)
            tf.train.Checkpoint(layer=layer).read(str(path / "ckpt"))
            layer.build(None)
        with np.load(path / "expected.npz") as expected:
            assert_same(state(layer), dict(expected))
    return len(written)
