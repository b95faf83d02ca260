"""A model of ratings that is trained as they come: biased factorisation.

A user and a movie have a vector and a bias each, and the rating is

    mean + user's bias + movie's bias + <user's vector, movie's vector>.

Who has no row has a vector and a bias of zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf
import tf_keras

import tfrs_embed

#: A row has so many factors, and the bias.
FACTORS = 16
ROW = FACTORS + 1
#: Ids by the name of their table, as the model takes them.
SPECS = {
    "user": tf.TensorSpec([None], tf.int64),
    "movie": tf.TensorSpec([None], tf.int64),
}


class StreamModel(tf_keras.Model):
    """Predicts ratings, and learns from them in batches.

    Args:
        tables: those of users and movies, named "user" and "movie", of rows of
            `ROW` numbers.
        batch_size: ratings per step.
        learning_rate: of the tables' Adagrad.
        penalty: of squared vectors, of each rating's user and movie.
    """

    def __init__(
        self,
        tables: Sequence[tfrs_embed.TableConfig],
        batch_size: int,
        learning_rate: float,
        penalty: float,
    ) -> None:
        super().__init__()
        self.embeddings = tfrs_embed.PartialTPUEmbedding(
            {t.name: tfrs_embed.FeatureConfig(t.name, t) for t in tables},
            # With Keras's initial accumulator of 0.1 a row's first steps, which
            # are the only ones of most users, would do nothing.
            tf_keras.optimizers.Adagrad(
                learning_rate, initial_accumulator_value=1e-5
            ),
            size_threshold=0,
        )
        self.embeddings.build(None)
        self.mean = tf.Variable(3.5)
        self.optimizer_of_mean = tf_keras.optimizers.SGD(0.01)
        self.batch_size = batch_size
        self.penalty = penalty

    def call(
        self, ids: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        vectors = self.embeddings(ids, training=training)
        user, movie = vectors["user"], vectors["movie"]
        if training:
            squares = tf.add_n([tf.reduce_sum(v**2) for v in (user, movie)])
            self.add_loss(self.penalty * squares / self.batch_size)
        return (
            self.mean
            + (user[:, -1] + movie[:, -1])
            + tf.reduce_sum(user[:, :-1] * movie[:, :-1], axis=-1)
        )

    @tf.function(input_signature=[SPECS])
    def rate(self, ids: dict[str, tf.Tensor]) -> tf.Tensor:
        """Predicts the stars that users give movies."""
        return tf.clip_by_value(self(ids, training=False), 1.0, 5.0)

    @tf.function(input_signature=[SPECS, tf.TensorSpec([None], tf.float32)])
    def learn(self, ids: dict[str, tf.Tensor], stars: tf.Tensor) -> None:
        """Trains a step."""
        with tf.GradientTape() as tape:
            errors = self(ids, training=True) - stars
            loss = tf.reduce_sum(errors**2) / self.batch_size
            loss += tf.add_n(self.losses)
        variables = self.trainable_variables
        gradients = tape.gradient(loss, variables)
        self.optimizer_of_mean.apply_gradients(
            zip(gradients, variables, strict=True)
        )
