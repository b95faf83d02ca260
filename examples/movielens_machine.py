"""A factorisation machine for MovieLens's ratings, but for the Keras it is of.

A user's vector is the sum of the embeddings of what is known of the user, a
movie's likewise, and the rating is

    mean rating + user's bias + movie's bias + <user's vector, movie's vector>.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import movielens
import numpy as np
import tensorflow as tf

import tfrs_embed

FACTORS = 32
PENALTY = 0.05


def feature_configs(
    data: movielens.MovieLens,
    table_dtype: str = "float32",
    size_threshold: int | None = None,
) -> dict[str, tfrs_embed.FeatureConfig]:
    """Declares all features: one config each, one table per vocabulary.

    A movie has the same embedding in a user's history as by itself, because
    both features name one table.

    Args:
        data: what to train on.
        table_dtype: the dtype of the large tables' rows.
        size_threshold: rows above which a table is large; None: none is.
    """
    most = math.inf if size_threshold is None else size_threshold
    tables = {
        name: tfrs_embed.TableConfig(
            name,
            feature.vocabulary_size,
            FACTORS + 1,  # The last column is the bias.
            initializer=tf.keras.initializers.RandomNormal(stddev=0.03),
            # SVD++'s, for histories; a single movie is itself in any combiner.
            combiner="sqrtn" if name == "movie" else "mean",
            # Keras, which holds the small tables, has them in float32.
            dtype=table_dtype if feature.vocabulary_size > most else "float32",
        )
        for name, feature in data.features.items()
        if name != "history"
    }
    tables["history"] = tables["movie"]
    return {
        name: tfrs_embed.FeatureConfig(name, table)
        for name, table in tables.items()
    }


class FactorisationMachine:
    """Predicts the rating that a user gives a movie.

    Args:
        data: the data set, for its vocabularies and its mean rating.
        batch_size: ratings per step, of all replicas. Gradients are summed over
            replicas, so each replica's loss is its part of the batch's mean.
        table_optimizer: trains the large tables.
        size_threshold: rows above which a table is large; None: none is.
        table_dtype: the dtype of the large tables' rows.
        **layer_options: further arguments of the `PartialTPUEmbedding`.
    """

    #: The layers of the model's Keras.
    layers_of_keras: Any
    #: The model's, of either Keras.
    add_loss: Callable[[tf.Tensor], None]

    def __init__(
        self,
        data: movielens.MovieLens,
        batch_size: int,
        table_optimizer: Any,
        size_threshold: int | None,
        table_dtype: str = "float32",
        **layer_options: Any,
    ) -> None:
        super().__init__()
        self.user_features = tuple(data.user_features)
        self.movie_features = tuple(data.movie_features)
        self.mean_rating = float(np.mean(data.train.rating))
        self.batch_size = batch_size
        replicas = tf.distribute.get_strategy().num_replicas_in_sync
        self.embeddings = self.layers_of_keras.PartialTPUEmbedding(
            feature_configs(data, table_dtype, size_threshold),
            optimizer=table_optimizer,
            batch_size=batch_size // replicas,
            size_threshold=size_threshold,
            **layer_options,
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
