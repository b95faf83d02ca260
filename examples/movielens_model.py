"""A model of MovieLens's ratings, for one device and for many.

It is a factorisation machine: a user's vector is the sum of the embeddings of
what is known of the user, a movie's likewise, and the rating is

    mean rating + user's bias + movie's bias + <user's vector, movie's vector>.

One `PartialTPUEmbedding` holds all tables. The large ones are trained row by
row with Adagrad, the others by the model's Adam.
"""

from __future__ import annotations

from typing import Any

import movielens
import numpy as np
import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras
from tf_keras.optimizers import schedules

import tfrs_embed

FACTORS = 32
PENALTY = 0.05


def make(
    data: movielens.MovieLens,
    batch_size: int,
    steps: int,
    size_threshold: int | None,
    steps_per_execution: int = 1,
    **layer_options: Any,
) -> RankingModel:
    """Returns a model, compiled.

    Args:
        data: what to train on.
        batch_size: ratings per step, of all replicas.
        steps: the steps of the whole training.
        size_threshold: rows above which a table is large; None: none is.
        steps_per_execution: steps that Keras runs at once.
        **layer_options: arguments of its `PartialTPUEmbedding`.
    """

    def decay(learning_rate: float) -> schedules.LearningRateSchedule:
        """Falls linearly, to zero at the end of training."""
        return schedules.PolynomialDecay(learning_rate, steps, 0.0)

    model = RankingModel(
        data,
        batch_size,
        # A row's gradient is a mean over the batch, so that of a rare row is
        # tiny: next to Keras's initial accumulator of 0.1 it would do nothing.
        tf_keras.optimizers.Adagrad(
            decay(0.03), initial_accumulator_value=1e-5
        ),
        size_threshold,
        **layer_options,
    )
    # TFRS's steps return metrics over all replicas, and Keras would add these.
    model.distribute_reduction_method = "first"
    model.compile(
        tf_keras.optimizers.Adam(decay(0.002)),
        steps_per_execution=steps_per_execution,
    )
    return model


def feature_configs(
    data: movielens.MovieLens,
) -> dict[str, tfrs_embed.FeatureConfig]:
    """Declares all features: one config each, one table per vocabulary.

    A movie has the same embedding in a user's history as by itself, because
    both features name one table.
    """
    tables = {
        name: tfrs_embed.TableConfig(
            name,
            feature.vocabulary_size,
            FACTORS + 1,  # The last column is the bias.
            initializer=tf_keras.initializers.RandomNormal(stddev=0.03),
            # SVD++'s, for histories; a single movie is itself in any combiner.
            combiner="sqrtn" if name == "movie" else "mean",
        )
        for name, feature in data.features.items()
        if name != "history"
    }
    tables["history"] = tables["movie"]
    return {
        name: tfrs_embed.FeatureConfig(name, table)
        for name, table in tables.items()
    }


class RankingModel(tfrs.models.Model):
    """Predicts the rating that a user gives a movie.

    Args:
        data: the data set, for its vocabularies and its mean rating.
        batch_size: ratings per step, of all replicas. Gradients are summed over
            replicas, so each replica's loss is its part of the batch's mean.
        table_optimizer: trains the large tables.
        size_threshold: rows above which a table is large; None: none is.
        **layer_options: further arguments of the `PartialTPUEmbedding`.
    """

    def __init__(
        self,
        data: movielens.MovieLens,
        batch_size: int,
        table_optimizer: tf_keras.optimizers.Optimizer,
        size_threshold: int | None,
        **layer_options: Any,
    ) -> None:
        super().__init__()
        self.user_features = tuple(data.user_features)
        self.movie_features = tuple(data.movie_features)
        self.mean_rating = float(np.mean(data.train.rating))
        self.batch_size = batch_size
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        self.embeddings = tfrs_embed.PartialTPUEmbedding(
            feature_configs(data),
            optimizer=table_optimizer,
            batch_size=batch_size // replicas,
            size_threshold=size_threshold,
            **layer_options,
        )
        self.task = tfrs.tasks.Ranking(
            loss=tf_keras.losses.MeanSquaredError(reduction="sum"),
            metrics=[tf_keras.metrics.RootMeanSquaredError("rmse")],
        )

    def call(
        self, features: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        vectors = self.embeddings(features, training=training)
        # In place of weight decay, which would touch every row of a table.
        for vector in vectors.values():
            squares = tf.reduce_sum(tf.square(vector))
            self.add_loss(PENALTY * squares / self.batch_size)
        user = tf.add_n([vectors[name] for name in self.user_features])
        movie = tf.add_n([vectors[name] for name in self.movie_features])
        rating = (
            self.mean_rating
            + (user[:, -1] + movie[:, -1])
            + tf.reduce_sum(user[:, :-1] * movie[:, :-1], axis=-1)
        )
        # Not in training: outside the range there would be no gradient.
        return rating if training else tf.clip_by_value(rating, 1.0, 5.0)

    def compute_loss(
        self, inputs: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        features = dict(inputs)
        rating = features.pop("rating")
        predicted = self(features, training=training)
        # With an axis to take Keras's mean over, which is not the batch's.
        loss = self.task(rating[:, None], predicted[:, None])
        return loss / self.batch_size
