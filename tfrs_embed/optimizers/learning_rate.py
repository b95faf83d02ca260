"""Learning rates that may change between steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import keras_configs, keras_versions
from tfrs_embed.compat.arguments import number
from tfrs_embed.compat.unmirrored import UnmirroredVariable

Factor = Callable[[tf.Tensor], tf.Tensor]


class LearningRate:
    """A learning rate, read anew at each step.

    Args:
        given: returns the rate's source: a variable, a schedule or a callable.
            Its first call may make the variable.
        owned: whether nothing else reads or assigns the source.
        factors: factors, functions of the number of earlier updates, each with
            its formula.
    """

    def __init__(
        self,
        given: Callable[[], Any],
        owned: bool = False,
        factors: tuple[tuple[Factor, str], ...] = (),
    ) -> None:
        self.owned = owned
        self.given = given
        self._factors = factors

    @classmethod
    def convert(cls, value: Any, where: str) -> LearningRate:
        """Makes a learning rate; variables are made when it is first used.

        Args:
            value: a number, which becomes an assignable variable; a
                `tf.Variable`, or Keras 3's; a Keras `LearningRateSchedule` of
                the number of earlier updates; or a callable without arguments
                that returns a number or a scalar tensor.
            where: the optimizer, for error messages.

        Raises:
            ValueError: a number that is negative or not finite.
            TypeError: another kind of value.
        """
        value = keras_versions.variable(value)
        if isinstance(value, tf.Variable) or callable(value):
            return cls(lambda: value)
        if isinstance(value, tf.Tensor) and tf.executing_eagerly():
            value = value.numpy()
        try:
            rate = check_rate(value, where)
        except TypeError:
            raise TypeError(
                f"{where}: learning_rate must be a number, a variable, a Keras "
                f"LearningRateSchedule or a callable, got {value!r}."
            ) from None

        @functools.cache
        def variable() -> tf.Variable:
            with tf.init_scope():
                return UnmirroredVariable(
                    rate,
                    dtype=tf.float32,
                    trainable=False,
                    name="learning_rate",
                )

        return cls(variable, owned=True)

    def times(self, factor: Factor, formula: str) -> LearningRate:
        """Returns this rate times `factor(step)`; both have one source."""
        factors = (*self._factors, (factor, formula))
        return LearningRate(self.given, self.owned, factors)

    @property
    def formulas(self) -> list[str]:
        """The factors' formulas."""
        return [formula for _, formula in self._factors]

    @property
    def variable(self) -> tf.Variable | None:
        """The variable with the rate, for SavedModels; None if computed."""
        variable = self.given()
        return variable if isinstance(variable, tf.Variable) else None

    def at(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the rate after `step` updates, a scalar float32."""
        rate = self.base(step)
        for factor, _ in self._factors:
            rate = rate * factor(step)
        return rate

    def base(self, step: tf.Tensor) -> tf.Tensor:
        """Returns the given or assigned rate, before any factor."""
        value = self.given()
        value = value(step) if is_schedule(value) else call(value)
        return tf.cast(tf.convert_to_tensor(value), tf.float32)

    def assign(self, value: Any) -> None:
        """Sets the rate from the next step on.

        A rate computed by a schedule or a callable is an AttributeError, a
        negative or infinite one a ValueError.
        """
        if self.variable is None:
            raise AttributeError(
                "A schedule or a callable computes this learning rate."
            )
        check_rate(float(value), "Assignment")
        self.variable.assign(value)


def is_schedule(value: Any) -> bool:
    """Whether a value is a learning rate schedule of either Keras."""
    return any(
        c.__name__ == "LearningRateSchedule" for c in type(value).__mro__
    )


def stored(rate: Any, name: str) -> Any:
    """Returns a rate as JSON-able; a ValueError for variables, callables."""
    if is_schedule(rate):
        return keras_versions.keras_of(rate).optimizers.schedules.serialize(
            rate
        )
    if callable(rate) or isinstance(keras_versions.variable(rate), tf.Variable):
        raise ValueError(
            f"A config can't store {name}'s learning_rate of the type "
            f"{type(rate).__name__}; use a number or a LearningRateSchedule."
        )
    return rate if isinstance(rate, (int, float)) else float(rate)


def restored(rate: Any, keras: Any, where: str) -> Any:
    """Returns the rate given to `stored`, a number or a schedule of `keras`."""
    if not isinstance(rate, Mapping):
        return rate
    return keras_configs.deserialize(
        rate, "optimizers.schedules", keras, f"{where}: learning_rate"
    )


def check_rate(rate: Any, where: str) -> float:
    """Returns a rate as a float, finite and at least 0."""
    return number(rate, f"{where}: learning_rate", positive=False)


def call(value: Any) -> Any:
    """Returns a number, variable or tensor, or the result of a callable."""
    if tf.is_tensor(value) or not callable(value):
        return value
    result = value()
    if tf.is_tensor(result) or tf.executing_eagerly():
        return result
    # A number would become a constant of the traced function; this calls the
    # callable at each step.
    return tf.numpy_function(
        lambda: np.float32(value()), [], tf.float32, stateful=True
    )
