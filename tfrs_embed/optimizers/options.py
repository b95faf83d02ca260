"""Clipping of gradients, decay and norms of rows, beside any update rule.

The order is fixed: a row's gradient is summed over the global batch and
clipped; the row decays; the rule updates it by the clipped gradient; the new
row's norm is limited.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.arguments import finite, integer, number

#: The names of the options that clip gradients; a table has one of them.
CLIPS = ("clipvalue", "row_clipnorm", "clipnorm", "global_clipnorm")

#: The names of the options that need all columns of a row.
WHOLE_ROWS = ("row_clipnorm", "max_norm")

_ACCUMULATION = "gradient_accumulation_steps"

Limits = tuple[float | None, float | None]


@dataclasses.dataclass(frozen=True)
class UpdateOptions:
    """Changes before and after an update rule; `Regularized` has the formulas.

    `clipvalue` is a pair of limits here, one of which may be None.
    """

    clipvalue: Limits | None = None
    row_clipnorm: float | None = None
    clipnorm: float | None = None
    global_clipnorm: float | None = None
    weight_decay: float = 0.0
    max_norm: float | None = None
    gradient_accumulation_steps: int = 1

    @classmethod
    def check(cls, where: str, **given: Any) -> UpdateOptions:
        """Checks options by name, as `Regularized` takes them; None: not given.

        Raises:
            ValueError: a value is out of its range, or there are several clips.
            TypeError: a value is not a number.
        """
        asked = {k: v for k, v in given.items() if v is not None}
        clips = [name for name in CLIPS if name in asked]
        if len(clips) > 1:
            values = " and ".join(f"{name}={asked[name]!r}" for name in clips)
            raise ValueError(f"{where}: {values}; give only one of them.")
        made: dict[str, Any] = {
            name: _limits(value, where)
            if name == "clipvalue"
            else number(value, f"{where}: {name}", name != "weight_decay")
            for name, value in asked.items()
            if name != _ACCUMULATION
        }
        if _ACCUMULATION in asked:
            made[_ACCUMULATION] = integer(
                asked[_ACCUMULATION], f"{where}: {_ACCUMULATION}"
            )
        return cls(**made)

    def given(self) -> dict[str, Any]:
        """Returns the options that differ from their defaults, by name."""
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != field.default
        }

    @property
    def accumulation(self) -> int | None:
        """The number of steps that make one update; None: each makes one."""
        steps = self.gradient_accumulation_steps
        return None if steps == 1 else steps

    @property
    def norm(self) -> float | None:
        """The limit of a norm over many rows, or None."""
        return self.clipnorm or self.global_clipnorm

    @property
    def limits(self) -> tuple[float, float]:
        """The limits of each number of a gradient, infinite without limits."""
        low, high = self.clipvalue or (None, None)
        return (
            -math.inf if low is None else low,
            math.inf if high is None else high,
        )

    def clip_rows(self, gradients: tf.Tensor) -> tf.Tensor:
        """Clips the gradients of rows, [rows, dim] float32, row by row."""
        if self.clipvalue is not None:
            low, high = self.limits
            # tf.clip_by_value changes NaN on some devices.
            gradients = tf.where(gradients < low, low, gradients)
            return tf.where(gradients > high, high, gradients)
        return _limit_norms(gradients, self.row_clipnorm)

    def limit_rows(self, rows: tf.Tensor) -> tf.Tensor:
        """Scales new rows, [rows, dim] float32, down to `max_norm`."""
        return _limit_norms(rows, self.max_norm)


NO_OPTIONS = UpdateOptions()


def factor(squares: tf.Tensor, limit: float) -> tf.Tensor:
    """Returns the factor that limits a norm, from the norm's square."""
    return limit / tf.maximum(tf.sqrt(squares), limit)


def _limit_norms(rows: tf.Tensor, limit: float | None) -> tf.Tensor:
    if limit is None:
        return rows
    squares = tf.reduce_sum(tf.square(rows), 1, keepdims=True)
    return rows * factor(squares, limit)


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
            f"{where}: clipvalue's low must not exceed high, got {value!r}."
        )
    return low, high
