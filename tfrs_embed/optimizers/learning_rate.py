"""Learning rates that may change between steps."""

from __future__ import annotations

import copy
import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed import kerases
from tfrs_embed.unmirrored import UnmirroredVariable

Factor = Callable[[tf.Tensor], tf.Tensor]


class LearningRate:
    """A learning rate, read anew at each step.

    Args:
        read: takes the number of updates made so far, a scalar int64 tensor,
            and returns the rate, a scalar.
        write: assigns a new rate; None if it is computed and can't be assigned.
        given: returns what the rate is read from: a variable, a schedule or
            a callable.
        owned: whether nothing else reads or assigns what it is read from.
    """

    def __init__(
        self,
        read: Callable[[tf.Tensor], Any],
        write: Callable[[Any], Any] | None = None,
        given: Callable[[], Any] = lambda: None,
        owned: bool = False,
    ) -> None:
        self.owned = owned
        self._read = read
        self._write = write
        self._given = given
        self._factors: tuple[tuple[Factor, str], ...] = ()

    @classmethod
    def of(cls, value: Any, where: str) -> LearningRate:
        """Makes a learning rate of whatever a user may give for one.

        Args:
            value: a number, which becomes an assignable variable; a
                `tf.Variable`, or Keras 3's; a Keras `LearningRateSchedule`,
                which gets the number of updates made so far; or a callable
                without arguments that returns a number or a scalar tensor.
            where: the optimizer, for error messages.

        Returns:
            The learning rate.

        Raises:
            ValueError: a number that is negative or not finite.
            TypeError: none of the above.
        """
        value = kerases.variable(value)
        if isinstance(value, tf.Variable):
            return cls(lambda step: value, value.assign, lambda: value)
        if is_schedule(value):
            return cls(value, given=lambda: value)
        if callable(value):
            return cls(lambda step: call(value), given=lambda: value)
        rate = _number(value, where)
        with tf.init_scope():
            variable = UnmirroredVariable(
                rate, dtype=tf.float32, trainable=False, name="learning_rate"
            )
        return cls(
            lambda step: variable, variable.assign, lambda: variable, owned=True
        )

    def times(self, factor: Factor, formula: str) -> LearningRate:
        """Returns this rate times `factor(step)`; assigning it sets this.

        Args:
            factor: the factor, of the number of updates made so far.
            formula: says what it is.
        """
        rate = LearningRate(self._read, self._write, self._given, self.owned)
        rate._factors = (*self._factors, (factor, formula))
        return rate

    @property
    def given(self) -> Any:
        """The source of the rate: a variable, a schedule or a callable."""
        return self._given()

    @property
    def formulas(self) -> list[str]:
        """The factors' formulas."""
        return [formula for _, formula in self._factors]

    @property
    def variable(self) -> tf.Variable | None:
        """The variable that holds the rate, or None if it is computed.

        A SavedModel must contain it: the functions it holds read it.
        """
        variable = self._given()
        return variable if isinstance(variable, tf.Variable) else None

    def at(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the rate after `step` updates, a scalar float32 tensor."""
        rate = self.base(step)
        for factor, _ in self._factors:
            rate = rate * factor(step)
        return rate

    def base(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the rate before any factor: what was given or assigned."""
        return tf.cast(tf.convert_to_tensor(self._read(step)), tf.float32)

    def assign(self, value: Any) -> None:
        """Sets the rate from the next step on.

        Args:
            value: the new rate.

        Raises:
            AttributeError: the rate is computed by a schedule or a callable.
            ValueError: the rate is negative or not finite.
        """
        if self._write is None or self.variable is None:
            raise AttributeError(
                "This learning rate is computed by a schedule or a callable "
                "and can't be assigned."
            )
        check_rate(float(value), "Assignment")
        self._write(value)


def is_schedule(value: Any) -> bool:
    """Tells a Keras learning rate schedule, of tf_keras or of Keras 3."""
    return any(
        c.__name__ == "LearningRateSchedule" for c in type(value).__mro__
    )


def stored(rate: Any, name: str) -> Any:
    """Returns a rate that an optimizer was given, JSON-able.

    Args:
        rate: what `LearningRate.of` takes.
        name: the optimizer's class, for the error.

    Raises:
        ValueError: it is a callable or a variable.
    """
    if is_schedule(rate):
        return kerases.of(rate).optimizers.schedules.serialize(rate)
    if callable(rate) or isinstance(kerases.variable(rate), tf.Variable):
        raise ValueError(
            f"{name}'s learning_rate is a {type(rate).__name__}, which can't "
            "be stored in a config; use a number or a Keras "
            "LearningRateSchedule."
        )
    return rate if isinstance(rate, (int, float)) else float(rate)


def restored(rate: Any, keras: Any) -> Any:
    """Returns the rate that `stored` was given.

    Args:
        rate: what it returned.
        keras: the Keras of schedules.
    """
    if isinstance(rate, Mapping):
        # Keras writes into what it reads.
        rate = copy.deepcopy(dict(rate))
        return keras.optimizers.schedules.deserialize(rate)
    return rate


def check_given(value: Any, where: str) -> None:
    """Raises what `LearningRate.of` would, and makes no variable."""
    value = kerases.variable(value)
    # A schedule is a callable.
    if not isinstance(value, tf.Variable) and not callable(value):
        _number(value, where)


def _number(value: Any, where: str) -> float:
    """A rate that is given as a number, checked."""
    if isinstance(value, tf.Tensor) and tf.executing_eagerly():
        value = value.numpy()
    number = np.asarray(value)
    is_number = isinstance(value, (numbers.Real, np.ndarray, np.generic))
    if not is_number or isinstance(value, bool) or number.ndim:
        raise TypeError(
            f"{where}: learning_rate must be a number, a variable, a Keras "
            f"LearningRateSchedule or a callable, got {value!r}."
        )
    rate = float(value)
    check_rate(rate, where)
    return rate


def check_rate(rate: float, where: str) -> None:
    """Raises ValueError unless `rate` is finite and not negative."""
    if not math.isfinite(rate) or rate < 0:
        raise ValueError(
            f"{where}: learning_rate must be finite and >= 0, got {rate!r}."
        )


def call(value: Any) -> Any:
    """Returns `value`, or what it returns if it is a callable.

    Args:
        value: a number, a variable, a tensor, or a callable without arguments.

    Returns:
        A number, a variable or a scalar tensor.
    """
    if tf.is_tensor(value) or not callable(value):
        return value
    result = value()
    if tf.is_tensor(result) or tf.executing_eagerly():
        return result
    # A plain number would become a constant of the traced function: call the
    # callable again at each step instead.
    return tf.numpy_function(
        lambda: np.float32(value()), [], tf.float32, stateful=True
    )
