"""Checks of arguments' names, and of common kinds of values.

An error for a misspelt name suggests the right one. `what` begins the error of
a value: "Table 'user': embedding_dim".
"""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

# Arguments of every Keras layer, and some of its configs.
_KERAS = (
    "name",
    "dtype",
    "trainable",
    "activity_regularizer",
    "input_shape",
    "batch_input_shape",
    "input_dim",
    "batch_size",
    "weights",
    "dynamic",
    "implementation",
)
# Those that errors may suggest.
_SUGGESTED = _KERAS[:4]
_MOST = 2**63 - 1
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def named(init: F) -> F:
    """Makes a class's `__init__` or `__new__` refuse unknown names.

    The TypeError comes before one for a missing argument. A method with
    `**kwargs` also takes the names of Keras layers.
    """
    known, more = names(init)

    @functools.wraps(init)
    def checking(self: Any, *args: Any, **kwargs: Any) -> Any:
        cls = self if isinstance(self, type) else type(self)
        allowed = (*known, *_KERAS) if more else known
        require_known(
            cls.__name__,
            [k for k in kwargs if k not in allowed],
            (*known, *_SUGGESTED) if more else known,
        )
        return init(self, *args, **kwargs)

    # Keras 3 reads the signature without unwrapping.
    checking.__signature__ = inspect.signature(init)  # type: ignore[attr-defined]
    return checking  # type: ignore[return-value]


def named_fields(cls: type[T]) -> type[T]:
    """Checks the names of a dataclass's arguments, as `named`."""
    cls.__init__ = named(cls.__init__)  # type: ignore[method-assign]
    return cls


def names(function: Callable[..., Any]) -> tuple[list[str], bool]:
    """Returns a method's arguments' names, and whether it has `**kwargs`."""
    _, *parameters = inspect.signature(function).parameters.values()
    return (
        [p.name for p in parameters if p.kind not in _VARIADIC],
        any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters),
    )


def require_known(
    where: str, unknown: Iterable[str], known: Sequence[str]
) -> None:
    """Raises a TypeError for an unknown name, with a similar known one."""
    for name in unknown:
        near = difflib.get_close_matches(name.lower(), known, n=1) or [
            k for k in known if name and (name in k or k in name)
        ]
        meant = f"; did you mean '{near[0]}'?" if near else "."
        raise TypeError(
            f"{where} has no argument '{name}'{meant} Its arguments are "
            f"{', '.join(known)}."
        )


def as_int(value: Any) -> int | None:
    """Returns an integer of any type, also NumPy's, as int; else None."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def integer(value: Any, what: str, least: int = 1, most: int = _MOST) -> int:
    """Returns an integer from `least` to `most` as int, else a ValueError.

    By default `most` is int64's.
    """
    number = as_int(value)
    if number is None or not least <= number <= most:
        wanted = f">= {least}" if most == _MOST else f"from {least} to {most}"
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


def convert_fields(
    config: Any, where: str, **checks: Callable[[Any, str], Any]
) -> None:
    """Sets a frozen dataclass's fields to the results of their checks."""
    for field, check in checks.items():
        value = check(getattr(config, field), f"{where}: {field}")
        object.__setattr__(config, field, value)


def flag(value: Any, what: str) -> bool:
    """Returns a bool; a TypeError for other values."""
    if not isinstance(value, bool):
        raise TypeError(f"{what} must be True or False, got {value!r}.")
    return value


def text(value: Any, what: str) -> str:
    """Returns a non-empty string; a TypeError for other values."""
    if not isinstance(value, str) or not value:
        raise TypeError(f"{what} must be a non-empty string, got {value!r}.")
    return value


def choice(value: Any, choices: Iterable[Any], what: str) -> None:
    """Raises a ValueError unless a value is one of `choices`."""
    if value not in choices:
        raise ValueError(
            f"{what} must be one of {list(choices)}, got {value!r}."
        )
