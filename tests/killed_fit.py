"""A `fit` that is killed, and started again until it ends.

    python killed_fit.py KIND FOLDER KILL

It trains in the folder and goes on from its last checkpoint; after KILL steps
it kills itself with SIGKILL, unless KILL is 0. At the end it writes
`result.npz`. Tests also call `train` in their own process.
"""

import os
import pathlib
import signal
import sys

import numpy as np
import tensorflow as tf

import tfrs_embed
from keras_under_test import NUMBER, keras, layers
from tfrs_embed import FeatureConfig, TableConfig
from tfrs_embed.checkpoint import FitPosition, SaveCallback

SAMPLES, BATCH, EPOCHS, STEPS = 37, 3, 3, 7
#: Inputs, and how many steps Keras makes at once.
KINDS = {
    "shuffled": 1,
    "shuffled, four steps at once": 4,
    # tf_keras takes an input of unknown length in single steps only.
    "of unknown length": 1,
    "repeated": 1,
    "repeated, three steps at once": 3,
    "not shuffled": 1,
    "a stream": 1,
}


class Model(keras.Model):
    """Notes the step in which it sees a sample."""

    def __init__(self):
        super().__init__()
        start = keras.initializers.RandomUniform(seed=1)
        table = TableConfig("t", SAMPLES, 4, start)
        self.embedding = layers.PartialTPUEmbedding(
            FeatureConfig("f", table), "adagrad", size_threshold=0
        )
        self.dense = keras.layers.Dense(1, kernel_initializer=start)
        shape = [EPOCHS * SAMPLES, SAMPLES]
        self.seen = tf.Variable(tf.zeros(shape, tf.int64), trainable=False)
        self.step = tf.Variable(0, dtype=tf.int64, trainable=False)

    def call(self, ids):
        return self.dense(self.embedding(ids))

    def train_step(self, data):
        ids, _ = data
        places = tf.stack([tf.fill(tf.shape(ids), self.step), ids], 1)
        self.seen.scatter_nd_add(places, tf.ones_like(ids))
        # Only with a batch: the end of the data is no step.
        self.step.assign_add(tf.sign(tf.size(ids, tf.int64)))
        return super().train_step(data)


def stream(position):
    for start in range(int(position or 0), SAMPLES, BATCH):
        stop = min(start + BATCH, SAMPLES)
        yield np.arange(start, stop), str(stop)


def dataset(kind):
    tf.random.set_seed(1)
    if kind == "a stream":
        number = tf.TensorSpec([None], tf.int64)
        batches = tfrs_embed.data.stream_dataset(stream, number).prefetch(2)
        return batches.map(lambda i: (i, tf.cast(i, tf.float32)))
    ids = tf.data.Dataset.range(SAMPLES)
    if kind != "not shuffled":
        ids = ids.shuffle(10, seed=5)
    if kind == "of unknown length":
        ids = ids.filter(lambda i: i % 5 > 0)
    if kind.startswith("repeated"):
        ids = ids.repeat()
    return ids.map(lambda i: (i, tf.cast(i, tf.float32))).batch(BATCH)


def make(kind, folder, build=True):
    """A model, its position and the manager of both's checkpoints."""
    model = Model()
    model.compile(
        keras.optimizers.Adam(0.01), "mse", steps_per_execution=KINDS[kind]
    )
    if NUMBER == 3 and build:
        # It doesn't restore models that are built later.
        model(tf.constant([1]))
    position = FitPosition()
    checkpoint = tf.train.Checkpoint(model=model, position=position)
    manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
    return model, position, manager


def train(
    kind, folder, *callbacks, every_steps=2, data=None, build=True, **arguments
):
    """Goes on until the end, or an error of a callback; returns the model."""
    model, position, manager = make(kind, folder, build)
    manager.restore_or_initialize()
    model.fit(
        dataset(kind) if data is None else data,
        **{
            "epochs": EPOCHS,
            "steps_per_epoch": STEPS if kind.startswith("repeated") else None,
            "verbose": 0,
            **arguments,
        },
        callbacks=[
            *callbacks,
            SaveCallback(manager, position, every_steps=every_steps),
        ],
    )
    return model, position


def result(model):
    """What the same training has the same of."""
    model(tf.constant([1]))  # If no step was left, it is not built.
    rows = model.embedding.embedding_tables["t"].numpy()
    kernel, bias = model.dense.get_weights()
    return {
        "seen": model.seen.numpy(),
        "rows": rows,
        "kernel": kernel,
        "bias": bias,
    }


class After(keras.callbacks.Callback):
    """Does something after some steps of this process."""

    def __init__(self, steps, action):
        super().__init__()
        self.left, self.action = steps, action

    def on_train_batch_end(self, batch, logs=None):
        assert "loss" in logs
        self.left -= 1
        if self.left == 0:
            self.action()


def main(kind, folder, kill):
    die = After(int(kill), lambda: os.kill(os.getpid(), signal.SIGKILL))
    model, _ = train(kind, folder, die)
    np.savez(pathlib.Path(folder, "result.npz"), **result(model))


if __name__ == "__main__":
    main(*sys.argv[1:])
