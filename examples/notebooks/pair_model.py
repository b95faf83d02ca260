"""The model of scaling_out.py, which its workers make too."""

from __future__ import annotations

import movielens
import tensorflow as tf
import tf_keras

import tfrs_embed

DIM = 32
NAMES = ("user", "history", "movie", "genres")


def features(data: movielens.MovieLens) -> dict[str, tfrs_embed.FeatureConfig]:
    """Declares tables and features; movies and histories share a table."""
    tables = {
        name: tfrs_embed.TableConfig(
            name,
            data.features[name].vocabulary_size,
            DIM,
            combiner="mean",
            # Values that don't depend on who has which row.
            initializer=tf_keras.initializers.RandomNormal(stddev=0.03, seed=1),
        )
        for name in ("user", "movie", "genres")
    }
    tables["history"] = tables["movie"]
    return {
        name: tfrs_embed.FeatureConfig(name, tables[name]) for name in NAMES
    }


def for_fit(
    batch: dict[str, tf.Tensor],
) -> tuple[dict[str, tf.Tensor], tf.Tensor]:
    """Makes inputs and labels of a batch of `movielens`."""
    return {name: batch[name] for name in NAMES}, batch["rating"][:, None]


def make(data: movielens.MovieLens) -> tf_keras.Model:
    """Returns a model that predicts stars, not compiled."""
    layer = tfrs_embed.PartialTPUEmbedding(
        features(data),
        tf_keras.optimizers.Adagrad(0.05, initial_accumulator_value=1e-5),
        size_threshold=500,
        name="vectors",
    )
    inputs = {}
    for name in NAMES:
        ragged = isinstance(data.features[name].ids, tf.RaggedTensor)
        inputs[name] = tf_keras.Input(
            [None] if ragged else [], dtype="int32", name=name, ragged=ragged
        )
    vectors = layer(inputs)
    x = tf_keras.layers.Concatenate()([vectors[name] for name in NAMES])
    x = tf_keras.layers.Dense(64, "relu")(x)
    x = tf_keras.layers.Dense(
        1, bias_initializer=tf_keras.initializers.Constant(3.5)
    )(x)
    return tf_keras.Model(inputs, x)
