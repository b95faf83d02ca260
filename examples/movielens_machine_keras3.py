"""The factorisation machine as a model of Keras 3."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from movielens_machine import FactorisationMachine

import tfrs_embed


class RankingModel(FactorisationMachine, keras.Model):
    """Predicts the rating that a user gives a movie."""

    layers_of_keras = tfrs_embed.keras3

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.loss_mean = keras.metrics.Mean("loss")
        self.rmse = keras.metrics.RootMeanSquaredError("rmse")

    def train_step(self, inputs: dict[str, tf.Tensor]) -> dict[str, Any]:
        with tf.GradientTape() as tape:
            loss = self.batch_loss(inputs, training=True)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(
            zip(gradients, self.trainable_variables, strict=True)
        )
        return self.results()

    def test_step(self, inputs: dict[str, tf.Tensor]) -> dict[str, Any]:
        self.batch_loss(inputs, training=False)
        return self.results()

    def batch_loss(
        self, inputs: dict[str, tf.Tensor], training: bool
    ) -> tf.Tensor:
        features = dict(inputs)
        rating = features.pop("rating")
        predicted = self(features, training=training)
        squares = tf.reduce_sum(tf.square(rating - predicted))
        loss = squares / self.batch_size + tf.add_n(self.losses)
        self.loss_mean.update_state(loss)
        self.rmse.update_state(rating, predicted)
        return loss

    def results(self) -> dict[str, Any]:
        return {"loss": self.loss_mean.result(), "rmse": self.rmse.result()}
