"""Optimizers of tables without a class in TensorFlow or Keras."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

from tfrs_embed.compat.arguments import convert_fields, number, share
from tfrs_embed.optimizers.learning_rate import LearningRate
from tfrs_embed.optimizers.options import NO_OPTIONS, Limits, UpdateOptions

#: The names of optimizers with their defaults: those of
#: `tf.tpu.experimental.embedding` and of this module, and Keras's AdamW and
#: RMSprop.
OptimizerName = Literal[
    "sgd",
    "adagrad",
    "adagrad_momentum",
    "adam",
    "adamw",
    "ftrl",
    "rmsprop",
    "row_wise_adagrad",
    "row_wise_adam",
]


@dataclasses.dataclass(frozen=True, eq=False)
class Regularized:
    """An optimizer of tables with limits of gradients and rows, or decay.

    An update of a row w with gradient g, summed over the global batch, begins
    with these steps. At most one of the first four is given:

        clipvalue:       g = clip(g, -clipvalue, clipvalue)
        row_clipnorm:    g *= c / max(c, norm(g))
        clipnorm:        g *= c / max(c, norm(gradient of the table))
        global_clipnorm: g *= c / max(c, norm(gradients of all tables that
                         share the optimizer in this layer))
        weight_decay:    w -= learning_rate * weight_decay * w

    It ends, after the optimizer's own step, with

        max_norm:        w *= c / max(c, norm(w))

    With gradient_accumulation_steps = n, g is the mean of the gradients of n
    steps, and each n-th step makes one update, as with Keras 3's optimizers:
    the learning rate, its schedule and the rule count updates, `layer.step`
    counts steps. Checkpoints don't hold the gradients of the steps since the
    last update. Tables with `DynamicKeys` have none.

    Norms are L2 norms over the rows that the step looked up. Only these rows
    decay, and only these are scaled to `max_norm`, whatever their gradients: a
    row that was initialized with a larger norm keeps it until then. Decay uses
    the learning rate without Adam's bias correction. `clipvalue`, `clipnorm`,
    `global_clipnorm` and `weight_decay` have the formulas of Keras's
    optimizers; a Keras optimizer with such settings needs no `Regularized`.
    `max_norm` is FBGEMM's of `EXACT_ROWWISE_ADAGRAD`. Torch's
    `Embedding(max_norm)` scales rows before a lookup, not after an update.
    Tables cut into columns can't have `row_clipnorm` or `max_norm`.

    It is accepted wherever a table's optimizer is. TPUs don't have it.

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
        optimizer: a table's optimizer without such options, or its name.
        clipvalue: the largest magnitude of each number of a row's gradient, or
            limits (low, high), one of which may be None.
        row_clipnorm: the largest norm of a row's gradient.
        clipnorm: the largest norm of a table's gradient.
        global_clipnorm: the largest norm of the gradients of all tables that
            share the optimizer.
        weight_decay: the share of a row, times the learning rate, that each of
            its updates removes.
        max_norm: the largest norm of a row after an update. Rows of two bytes
            may exceed it by their rounding.
        gradient_accumulation_steps: the number of steps that make one update.

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
    max_norm: float | None = None
    gradient_accumulation_steps: int | None = None

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.optimizer is None:
            raise TypeError(f"{name} needs an optimizer or its name, got None.")
        if self.options == NO_OPTIONS:
            raise ValueError(f"{name} needs one of {[*vars(NO_OPTIONS)]}.")

    @property
    def options(self) -> UpdateOptions:
        """The options, checked."""
        given = {name: getattr(self, name) for name in vars(NO_OPTIONS)}
        return UpdateOptions.check(type(self).__name__, **given)

    @property
    def learning_rate(self) -> Any:
        """The optimizer's learning rate; None for a name."""
        return getattr(self.optimizer, "learning_rate", None)


@dataclasses.dataclass(frozen=True, eq=False)
class RowWiseAdagrad:
    """Adagrad with one accumulator for each row of a table.

    A table's slot is `accumulators`, [vocabulary_size] float32, 1 / dim of
    Adagrad's. For a row w, its gradient g, summed over the global batch, and
    its accumulator a:

        a += mean(g ** 2)  # Over the row's columns.
        w -= learning_rate * g / (sqrt(a) + epsilon)

    This is FBGEMM's `EXACT_ROWWISE_ADAGRAD` (torchrec's `RowWiseAdagrad`), with
    its defaults, without weight decay, which `Regularized` adds. Rows without a
    gradient keep their values and accumulators.

    It is accepted wherever a table's optimizer is. `learning_rate` may be of
    any kind that `tf.tpu.experimental.embedding` takes, and is assigned at
    `layer.table_optimizers`. Tables cut into columns and tables on TPUs can't
    have it. The model's optimizer trains small tables of `PartialTPUEmbedding`,
    which are Keras's.

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
        initial_accumulator_value: the accumulators' first value, at least 0.
        epsilon: the term added to an accumulator's root, at least 0.

    Raises:
        ValueError: a value is negative or not finite, or both settings are 0: a
            gradient of zeros would give 0 / 0.
        TypeError: a value is of the wrong kind.
    """

    learning_rate: Any = 0.01
    initial_accumulator_value: float = 0.0
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        name = type(self).__name__
        LearningRate.convert(self.learning_rate, name)
        check = functools.partial(number, positive=False)
        convert_fields(
            self, name, initial_accumulator_value=check, epsilon=check
        )
        if self.initial_accumulator_value == self.epsilon == 0:
            raise ValueError(
                f"{name}: initial_accumulator_value or epsilon must be above "
                "0, as a gradient of zeros would give 0 / 0."
            )


@dataclasses.dataclass(frozen=True, eq=False)
class RowWiseAdam:
    """Adam with one second moment for each row of a table.

    A table's slots are `momenta`, [vocabulary_size, embedding_dim], and
    `velocities`, [vocabulary_size], both float32: about half of Adam's. For a
    row w, its gradient g, summed over the global batch, its momentum m and its
    velocity v, in the table's update number t, which begins at 1:

        m = beta_1 * m + (1 - beta_1) * g
        v = beta_2 * v + (1 - beta_2) * mean(g ** 2)  # Over the columns.
        m_hat = m / (1 - beta_1 ** t)
        v_hat = v / (1 - beta_2 ** t)
        w -= learning_rate * m_hat / (sqrt(v_hat) + epsilon)

    This is FBGEMM's `PARTIAL_ROWWISE_ADAM` (torchrec's `PartialRowWiseAdam`),
    with its defaults, without weight decay, which `Regularized` adds. Rows
    without a gradient keep their values and slots; t counts all updates of the
    table's layer, not those of a row.

    It is accepted wherever a table's optimizer is, as `RowWiseAdagrad` is.
    Tables cut into columns and tables on TPUs can't have it. Take
    `RowWiseAdagrad` where memory is scarce, which has no momenta, and Adam
    where columns have gradients of very different sizes.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 64)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", table),
        ...     tfrs_embed.optimizers.RowWiseAdam(0.001),
        ... )
        >>> [movie] = layer.placement.tables
        >>> movie.optimizer, movie.bytes
        ('RowWiseAdam', 10320000)

    Attributes:
        learning_rate: see `RowWiseAdagrad`.
        beta_1: the share of the momenta that an update keeps, at least 0 and
            below 1.
        beta_2: the share of the velocities that an update keeps, at least 0
            and below 1.
        epsilon: the term added to a velocity's root, above 0.

    Raises:
        ValueError: a value is out of its range or not finite.
        TypeError: a value is of the wrong kind.
    """

    learning_rate: Any = 0.01
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8

    def __post_init__(self) -> None:
        name = type(self).__name__
        LearningRate.convert(self.learning_rate, name)
        kept = functools.partial(share, whole=False)
        convert_fields(self, name, beta_1=kept, beta_2=kept, epsilon=number)
