"""A callback that copies the learning rate of a model's optimizer to tables."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed.compat import keras_versions
from tfrs_embed.compat.arguments import number
from tfrs_embed.optimizers.conversion import rate_of_keras
from tfrs_embed.optimizers.learning_rate import LearningRate
from tfrs_embed.optimizers.rules import TableOptimizer


class FollowLearningRate(keras_versions.PlainCallback):
    """Sets tables' learning rates to that of the model's optimizer.

    This callback, for tf_keras and Keras 3, sets the rate of all layers' tables
    before each batch to the current rate of `model.optimizer` times `factor`:
    set by `ReduceLROnPlateau`, `LearningRateScheduler` or an assignment, or
    computed by a schedule. Put it behind callbacks that set the rate before
    each batch.

    With `steps_per_execution` Keras calls it once for as many steps, during
    which the tables' rates stay. If a schedule shall change them in each step,
    give it to the tables' optimizer as well.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", movies), "adagrad"
        ... )
        >>> model = tf_keras.Sequential([layer, tf_keras.layers.Dense(1)])
        >>> model.compile(tf_keras.optimizers.Adam(0.25), "mse")
        >>> history = model.fit(
        ...     np.array([3, 7]),
        ...     np.array([0.0, 1.0]),
        ...     callbacks=[tfrs_embed.optimizers.FollowLearningRate(2.0)],
        ...     verbose=0,
        ... )
        >>> layer.table_optimizers["movies"].learning_rate
        0.5

    Args:
        factor: a table's rate divided by that of the model's optimizer.

    Raises:
        ValueError: the factor is not above 0, or not finite.
        TypeError: it is not a number.
    """

    def __init__(self, factor: float = 1.0) -> None:
        self._factor = number(factor, f"{type(self).__name__}: factor")
        self._model: Any = None
        self._optimizer: Any = None
        self._rate: LearningRate | None = None
        self._optimizers: list[TableOptimizer] = []
        self._given: float | None = None

    def set_model(self, model: Any) -> None:
        """Takes the model.

        Args:
            model: the model, of either Keras.
        """
        self._model = model

    def on_train_begin(self, logs: Any = None) -> None:
        """Finds the model's tables.

        Args:
            logs: ignored.

        Raises:
            ValueError: no table has an optimizer, or a rate can't be set.
        """
        self._given = None
        optimizer = self._model.optimizer
        # A LossScaleOptimizer's rate and steps are the inner optimizer's.
        self._optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self._rate = rate_of_keras(self._optimizer, "The optimizer")
        trained = {
            optimizer: f"Layer '{layer.name}', table '{table}'"
            for layer in self._model._flatten_layers()
            for table, optimizer in getattr(
                getattr(layer, "engine", None), "optimizers", {}
            ).items()
            if optimizer is not None
        }
        if not trained:
            raise ValueError(
                f"Model '{self._model.name}' has no layer with tables that an "
                "optimizer trains."
            )
        self._optimizers = []
        for optimizer, where in trained.items():
            if optimizer.rate.given() is not self._rate.given():
                if optimizer.rate.variable is None:
                    raise ValueError(
                        f"{where}: a schedule or a callable computes its "
                        "learning rate, so FollowLearningRate can't set it. "
                        "Give the table's optimizer a number."
                    )
                self._optimizers.append(optimizer)
            elif self._factor != 1:
                raise ValueError(
                    f"{where}: it has the learning rate of the model's "
                    f"optimizer itself, which can't be {self._factor} times "
                    "itself. Give the table an optimizer of its own."
                )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Sets the tables' rates.

        Args:
            batch: ignored.
            logs: ignored.
        """
        assert self._rate is not None
        step = keras_versions.variable(self._optimizer.iterations)
        rate = self._factor * float(self._rate.at(tf.cast(step, tf.int64)))
        if rate != self._given:
            for optimizer in self._optimizers:
                optimizer.learning_rate = rate
            self._given = rate
