"""Optimizers of tables that neither TensorFlow nor Keras has a class for."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from tfrs_embed.compat import kerases
from tfrs_embed.compat.arguments import number
from tfrs_embed.optimizers.learning_rate import (
    LearningRate,
    restored,
    stored,
)
from tfrs_embed.optimizers.options import NO_OPTIONS, Limits, UpdateOptions

#: The names of optimizers with their defaults: those of
#: `tf.tpu.experimental.embedding`, and of this module.
OptimizerName = Literal[
    "sgd", "adagrad", "adagrad_momentum", "adam", "ftrl", "row_wise_adagrad"
]


@dataclasses.dataclass(frozen=True, eq=False)
class Regularized:
    """An optimizer of tables with clipped gradients, or rows that decay.

    The optimizer's update of a row w begins with these, by the row's gradient
    g, summed over the global batch. Each of the first four excludes the others:

        clipvalue:       g = clip(g, -clipvalue, clipvalue)
        row_clipnorm:    g *= c / max(c, norm(g))
        clipnorm:        g *= c / max(c, norm(gradient of the table))
        global_clipnorm: g *= c / max(c, norm(gradients of all tables that
                         share the optimizer in this layer))
        weight_decay:    w -= learning_rate * weight_decay * w

    Norms are L2 norms, of the rows that the step looked up: the others have no
    gradient. Only these rows decay, too. Adam's bias correction is no part of
    the learning rate there. `clipvalue`, `clipnorm`, `global_clipnorm` and
    `weight_decay` have the formulas of Keras's optimizers, and those that a
    Keras optimizer has itself need no `Regularized`.

    It is given wherever a table's optimizer is. TPUs don't have it.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 64)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", table),
        ...     tfrs_embed.optimizers.Regularized(
        ...         tfrs_embed.optimizers.RowWiseAdagrad(0.05),
        ...         row_clipnorm=1.0,
        ...         weight_decay=1e-4,
        ...     ),
        ... )
        >>> layer.table_optimizers["movie"].options.row_clipnorm
        1.0

    Attributes:
        optimizer: a table's optimizer, or its name; no dict.
        clipvalue: the largest magnitude of each number of a row's gradient, or
            a pair of limits, (low, high), of which one may be None.
        row_clipnorm: the largest norm of a row's gradient.
        clipnorm: the largest norm of a table's gradient.
        global_clipnorm: the largest norm of the gradient of all tables that
            share the optimizer.
        weight_decay: the share of a row, times the learning rate, that each of
            its updates takes away.

    Raises:
        ValueError: a value is out of its range, several clips are given, or no
            option is.
        TypeError: a value is of the wrong kind.
    """

    optimizer: Any
    _: dataclasses.KW_ONLY
    clipvalue: float | Limits | None = None
    row_clipnorm: float | None = None
    clipnorm: float | None = None
    global_clipnorm: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.optimizer is None or isinstance(self.optimizer, Mapping):
            raise TypeError(
                f"{name}: the optimizer must be an optimizer or its name, got "
                f"{self.optimizer!r}."
            )
        if self.options == NO_OPTIONS:
            raise ValueError(
                f"{name}: give one of {[*vars(NO_OPTIONS)]}, or the optimizer "
                "alone."
            )

    @property
    def options(self) -> UpdateOptions:
        """The options, checked."""
        given = {name: getattr(self, name) for name in vars(NO_OPTIONS)}
        return UpdateOptions.of(type(self).__name__, **given)

    @property
    def learning_rate(self) -> Any:
        """The optimizer's learning rate; None: that of a name."""
        return getattr(self.optimizer, "learning_rate", None)


@dataclasses.dataclass(frozen=True, eq=False)
class RowWiseAdagrad:
    """Adagrad with one accumulator for each row of a table.

    A table's slot is `accumulators`, [vocabulary_size] float32: of a table of
    width dim, 1 / dim of what Adagrad's takes. For a row w, its gradient g,
    summed over the global batch, and its accumulator a:

        a += mean(g ** 2)  # Over the row's columns.
        w -= learning_rate * g / (sqrt(a) + epsilon)

    That is FBGEMM's `EXACT_ROWWISE_ADAGRAD` (torchrec's `RowWiseAdagrad`)
    without weight decay, which `Regularized` adds, and the defaults are
    FBGEMM's. It is lazy: a row that
    was not looked up keeps its values and its accumulator.

    It is given wherever a table's optimizer is, to a layer or to a table.
    `learning_rate` may be what those of `tf.tpu.experimental.embedding` take
    for one, and the rate is assigned at `layer.table_optimizers`. A table that
    is cut into columns can't have it, nor one on a TPU; small tables of
    `PartialTPUEmbedding`, which are Keras's, are trained by the model's
    optimizer.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 64)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", table),
        ...     tfrs_embed.optimizers.RowWiseAdagrad(0.05),
        ... )
        >>> [movie] = layer.placement.tables
        >>> movie.optimizer, movie.bytes
        ('RowWiseAdagrad', 5200000)

    Attributes:
        learning_rate: a number; a `tf.Variable`, or Keras 3's; a Keras
            `LearningRateSchedule`; or a callable without arguments.
        initial_accumulator_value: what accumulators begin with, at least 0.
        epsilon: what is added to an accumulator's root, at least 0.

    Raises:
        ValueError: a value is negative or not finite, or the accumulators begin
            with 0 and epsilon is 0: a gradient of zeros would give 0 / 0.
        TypeError: a value is of the wrong kind.
    """

    learning_rate: Any = 0.01
    initial_accumulator_value: float = 0.0
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        """Checks the fields, and makes the settings Python's."""
        name = type(self).__name__
        LearningRate.of(self.learning_rate, name)
        for setting in ("initial_accumulator_value", "epsilon"):
            given = getattr(self, setting)
            value = number(given, f"{name}: {setting}", positive=False)
            object.__setattr__(self, setting, value)
        if self.initial_accumulator_value == self.epsilon == 0:
            raise ValueError(
                f"{name}: initial_accumulator_value and epsilon are both 0, "
                "and a gradient of zeros would give 0 / 0: one of them must be "
                "more."
            )

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments to make an equal one, JSON-able.

        Returns:
            The arguments by name; a schedule as its Keras stores it.

        Raises:
            ValueError: the learning rate is a callable or a variable.
        """
        rate = stored(self.learning_rate, type(self).__name__)
        return {**vars(self), "learning_rate": rate}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> Any:
        """Makes one of what `get_config` returned.

        Args:
            config: the arguments by name.

        Returns:
            The optimizer.
        """
        rate = restored(config["learning_rate"], kerases.default())
        return cls(**{**config, "learning_rate": rate})
