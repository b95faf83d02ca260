"""A model that is exported and then updated by deltas, and its training."""

import contextlib

import numpy as np
import tensorflow as tf

import tfrs_embed
from keras_under_test import keras, layers

ROWS, DIM = 60, 4
#: Ids of all features. Of users, whose table has keys, the smallest and the
#: largest, and some that never come.
ASKED = {
    "movie": tf.range(ROWS, dtype=tf.int64),
    "hour": tf.range(ROWS, dtype=tf.int64) % 5,
    "user": tf.concat(
        [
            tf.range(ROWS - 2, dtype=tf.int64),
            [tf.int64.min, tf.int64.max],
        ],
        0,
    ),
}
SPECS = {name: tf.TensorSpec([None], tf.int64) for name in ASKED}


class Model(keras.Model):
    """A large table, a small one, and one of keys; and dense variables.

    Args:
        options: more large tables by name, each the options of its config; a
            `DistributedEmbedding` holds all of them. None: there are none.
    """

    def __init__(self, options=None):
        super().__init__()
        tables = {
            "movie": tfrs_embed.TableConfig("movie", ROWS, DIM),
            "hour": tfrs_embed.TableConfig("hour", 5, DIM),
            "user": tfrs_embed.TableConfig(
                "user", 16, DIM, keys=tfrs_embed.DynamicKeys()
            ),
        }
        self.names = list(options or {})
        for name in self.names:
            tables[name] = tfrs_embed.TableConfig(
                name, ROWS, 16, **options[name]
            )
        kind = layers.PartialTPUEmbedding
        if options is not None:
            kind = layers.DistributedEmbedding
        self.layer = kind(
            {n: tfrs_embed.FeatureConfig(n, t) for n, t in tables.items()},
            optimizer="adagrad",
            size_threshold=8,
        )
        self.layer.build(None)
        # A Keras layer may hold the table of hours.
        for table in self.layer.tables.values():
            with contextlib.suppress(NotImplementedError):
                table.track_changes()
        self.norm = keras.layers.BatchNormalization()
        self.dense = keras.layers.Dense(2)
        # What a step makes while it is traced has it traced again.
        for each in (self.norm, self.dense):
            each.build((None, 3 * DIM + 16 * len(self.names)))

    def call(self, inputs, training=False):
        inputs = {**inputs, **{n: inputs["movie"] for n in self.names}}
        vectors = self.layer(inputs, training=training)
        joined = tf.concat([vectors[name] for name in inputs], 1)
        return self.dense(self.norm(joined, training=training))

    @property
    def users(self):
        """The table of keys."""
        return self.layer.tables["user"]


class Trainer:
    """Trains a model with random ids.

    Args:
        strategy: where the model is made.
        options: as those of `Model`.
    """

    def __init__(self, strategy, options=None):
        self.size = 4 * strategy.num_replicas_in_sync
        with strategy.scope():
            self.model = Model(options)
            optimizer = keras.optimizers.SGD(0.02)
            optimizer.build(self.model.trainable_variables)
            self.model.compile(optimizer, "mse")
        self.random = np.random.default_rng(1)

    def train(self, users, steps=2):
        """Trains some steps.

        Args:
            users: keys of users, from which the steps' are drawn.
            steps: how many.
        """
        size = self.size * steps
        ids = {
            "movie": self.random.integers(0, ROWS, size),
            "hour": self.random.integers(0, 5, size),
            "user": self.random.choice(np.array(users, np.int64), size),
        }
        targets = self.random.normal(size=[size, 2])
        data = tf.data.Dataset.from_tensor_slices((ids, targets))
        data = data.batch(self.size, drop_remainder=True)
        self.model.fit(data, verbose=0)


def load(path):
    """A model as a server has it."""
    return tf.saved_model.load(str(path))


def answers(served):
    """What a served model says of `ASKED`."""
    return served.serve(ASKED).numpy()


def apply(served, path):
    """Applies a delta; returns the number of the last that was applied."""
    return int(served.apply_delta(str(path))["number"])
