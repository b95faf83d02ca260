"""The factorisation machine as a model of tensorflow_recommenders."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tensorflow_recommenders as tfrs
import tf_keras
from movielens_machine import FactorisationMachine

import tfrs_embed


class RankingModel(FactorisationMachine, tfrs.models.Model):
    """Predicts the rating that a user gives a movie."""

    layers_of_keras = tfrs_embed

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # TFRS's steps return metrics over all replicas, and Keras would add
        # these.
        self.distribute_reduction_method = "first"
        self.task = tfrs.tasks.Ranking(
            loss=tf_keras.losses.MeanSquaredError(reduction="sum"),
            metrics=[tf_keras.metrics.RootMeanSquaredError("rmse")],
        )

    def compute_loss(
        self, inputs: dict[str, tf.Tensor], training: bool = False
    ) -> tf.Tensor:
        features = dict(inputs)
        rating = features.pop("rating")
        predicted = self(features, training=training)
        # With an axis to take Keras's mean over, which is not the batch's.
        loss = self.task(rating[:, None], predicted[:, None])
        return loss / self.batch_size
