"""Checks of common kinds of values.

`what` begins the error of a value: "Table 'user': embedding_dim".
"""

from __future__ import annotations

import math
import numbers
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import numpy as np
import tensorflow as tf

T = TypeVar("T")

#: The largest int64.
MOST = 2**63 - 1


def as_int(value: Any) -> int | None:
    """Returns an integer of any type, also NumPy's, as int; else None."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def integer(value: Any, what: str, least: int = 1, most: int = MOST) -> int:
    """Returns an integer from `least` to `most` as int, else a ValueError.

    By default `most` is int64's.
    """
    number = as_int(value)
    if number is None or not least <= number <= most:
        wanted = f">= {least}" if most == MOST else f"from {least} to {most}"
        raise ValueError(f"{what} must be an integer {wanted}, got {value!r}.")
    return number


def integer_or_none(value: Any, what: str, least: int = 1) -> int | None:
    """Returns `integer`, or None for None."""
    return None if value is None else integer(value, what, least)


def finite(value: Any, what: str) -> float:
    """Returns a finite number as float; else a ValueError or TypeError."""
    is_number = isinstance(value, (numbers.Real, np.ndarray, np.generic))
    if isinstance(value, bool) or not is_number or np.ndim(value):
        raise TypeError(f"{what} must be a number, got {value!r}.")
    if not math.isfinite(float(value)):
        raise ValueError(f"{what} must be finite, got {value!r}.")
    return float(value)


def number(value: Any, what: str, positive: bool = True) -> float:
    """Returns a finite number above 0, or at least 0, as float."""
    checked = finite(value, what)
    if checked < 0 or (positive and checked == 0):
        least = "above" if positive else "at least"
        raise ValueError(f"{what} must be {least} 0, got {value!r}.")
    return checked


def share(value: Any, what: str, whole: bool = True) -> float:
    """Returns a number in [0, 1] as float; without `whole`, one below 1."""
    checked = finite(value, what)
    if not 0 <= checked <= 1 or (checked == 1 and not whole):
        end = "1]" if whole else "1)"
        raise ValueError(f"{what} must be in [0, {end}, got {value!r}.")
    return checked


def convert_fields(
    config: Any, where: str, **checks: Callable[[Any, str], Any]
) -> None:
    """Sets a frozen dataclass's fields to the results of their checks."""
    for field, check in checks.items():
        value = check(getattr(config, field), f"{where}: {field}")
        object.__setattr__(config, field, value)


def flag(value: Any, what: str) -> bool:
    """Returns a bool; a TypeError for other values."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{what} must be True or False, got {value!r}.")
    return bool(value)


def dtype_name(value: Any, choices: Iterable[str], what: str) -> str:
    """Returns the name of a dtype, or of its name; a ValueError for others."""
    try:
        # TensorFlow takes numbers, and so True, for codes of dtypes.
        name: str = "" if isinstance(value, int) else tf.as_dtype(value).name
    except (TypeError, ValueError):
        name = ""
    if name not in choices:
        raise ValueError(
            f"{what} must be one of {list(choices)}, got {value!r}."
        )
    return name


def text(value: Any, what: str) -> str:
    """Returns a non-empty string; a TypeError for other values."""
    if not isinstance(value, str) or not value:
        raise TypeError(f"{what} must be a non-empty string, got {value!r}.")
    return value


def choice(value: T, choices: Iterable[Any], what: str) -> T:
    """Returns a value that is one of `choices`; a ValueError for others."""
    if value not in choices:
        raise ValueError(
            f"{what} must be one of {list(choices)}, got {value!r}."
        )
    return value


def padding(value: Any, what: str) -> int | str | None:
    """Returns an id that counts as absent; a TypeError if it can't be one."""
    if value is None or isinstance(value, str):
        return value
    number = as_int(value)
    if number is None:
        raise TypeError(
            f"{what} must be an integer, a string or None, got {value!r}."
        )
    return number  # Python's own, which JSON takes.
