"""Clipping of gradients and decay of rows, beside any update rule.

They come in a fixed order: a row's gradient is summed over the global batch,
then clipped; then the row decays; then the rule updates it by the clipped
gradient.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.arguments import finite, number

#: The names of the options that clip gradients; a table has one of them.
CLIPS = ("clipvalue", "row_clipnorm", "clipnorm", "global_clipnorm")

Limits = tuple[float | None, float | None]


@dataclasses.dataclass(frozen=True)
class UpdateOptions:
    """What is done to gradients and rows before an update rule.

    `Regularized` has the formulas. A `clipvalue` is a pair of limits here, of
    which one may be None.
    """

    clipvalue: Limits | None = None
    row_clipnorm: float | None = None
    clipnorm: float | None = None
    global_clipnorm: float | None = None
    weight_decay: float = 0.0

    @classmethod
    def of(cls, where: str, **given: Any) -> UpdateOptions:
        """Checks options.

        Args:
            where: what they are for, in error messages.
            **given: the options by name, as `Regularized` takes them; None:
                not given.

        Raises:
            ValueError: a value is out of its range, or there are several clips.
            TypeError: a value is no number.
        """
        asked = {k: v for k, v in given.items() if v is not None}
        clips = [name for name in CLIPS if name in asked]
        if len(clips) > 1:
            values = " and ".join(f"{name}={asked[name]!r}" for name in clips)
            raise ValueError(
                f"{where}: {values} can't be combined; give one of them."
            )
        made: dict[str, Any] = {
            name: _limits(value, where)
            if name == "clipvalue"
            else number(value, f"{where}: {name}", name != "weight_decay")
            for name, value in asked.items()
        }
        return cls(**made)

    def joined(self, other: UpdateOptions, where: str) -> UpdateOptions:
        """These options and others; a ValueError if both have an option."""
        mine, its = self.given(), other.given()
        twice = [name for name in mine if name in its]
        if twice:
            raise ValueError(
                f"{where}: {twice[0]} is given twice, as {mine[twice[0]]!r} "
                f"and as {its[twice[0]]!r}; give it once."
            )
        return self.of(where, **mine, **its)

    def given(self) -> dict[str, Any]:
        """The options that aren't at their defaults, by name."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }

    @property
    def norm(self) -> float | None:
        """The limit of a norm over many rows; None: there is none."""
        return self.clipnorm or self.global_clipnorm

    @property
    def limits(self) -> tuple[float, float]:
        """The limits of each number of a gradient; without: infinite."""
        low, high = self.clipvalue or (None, None)
        return (
            -math.inf if low is None else low,
            math.inf if high is None else high,
        )

    def clip_rows(self, gradients: tf.Tensor) -> tf.Tensor:
        """Clips the gradients of rows, [rows, dim] float32, each by itself."""
        if self.clipvalue is not None:
            low, high = self.limits
            # Unlike tf.clip_by_value, these let NaN pass on every device.
            gradients = tf.where(gradients < low, low, gradients)
            return tf.where(gradients > high, high, gradients)
        if self.row_clipnorm is not None:
            squares = tf.reduce_sum(tf.square(gradients), 1, keepdims=True)
            return gradients * factor(squares, self.row_clipnorm)
        return gradients


#: Nothing comes before the rule.
NO_OPTIONS = UpdateOptions()


def factor(squares: tf.Tensor, limit: float) -> tf.Tensor:
    """What a gradient is multiplied by, so that its norm is at most a limit."""
    return limit / tf.maximum(tf.sqrt(squares), limit)


def _limits(value: Any, where: str) -> Limits:
    if not isinstance(value, (tuple, list)):
        most = number(value, f"{where}: clipvalue")
        return -most, most
    if len(value) != 2 or all(limit is None for limit in value):
        raise ValueError(
            f"{where}: clipvalue must be a number or a pair (low, high), of "
            f"which one may be None, got {value!r}."
        )
    low, high = (
        None if limit is None else finite(limit, f"{where}: clipvalue")
        for limit in value
    )
    if low is not None and high is not None and low > high:
        raise ValueError(
            f"{where}: clipvalue's low must not be above its high, got "
            f"{value!r}."
        )
    return low, high
