"""Scores of keys that a program gives, for the eviction rule "score".

A table with this rule counts no frequencies: a key's record holds a number in
the place of its frequency, whose order is that of the scores.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_MAGNITUDE, _SIGN = 2**31 - 1, 2**31


def as_numbers(scores: np.ndarray) -> np.ndarray:
    """Returns finite float32 scores as int64 in the same order; 0 for 0."""
    bits = np.asarray(scores, np.float32).view(np.int32).astype(np.int64)
    return np.where(bits < 0, -(bits & _MAGNITUDE), bits)


def as_scores(numbers: np.ndarray) -> np.ndarray:
    """Returns the float32 scores of which `as_numbers` has made numbers."""
    bits = np.where(numbers < 0, -numbers | _SIGN, numbers)
    return bits.astype(np.uint32).view(np.float32)


def checked(values: Any, keys: int, what: str) -> np.ndarray:
    """Returns the scores of a number of keys as float32, [keys].

    Errors begin with `what`.

    Raises:
        TypeError: the values are no numbers.
        ValueError: they have another shape, or one is not finite as float32.
    """
    given = np.asarray(values)
    if given.dtype.kind not in "iuf" and given.size:
        raise TypeError(f"{what}: scores must be numbers, got {given.dtype}.")
    if given.shape != (keys,):
        raise ValueError(
            f"{what}: scores must have the shape [{keys}], one for each key, "
            f"got {list(given.shape)}."
        )
    with np.errstate(over="ignore"):
        scores = given.astype(np.float32)
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        raise ValueError(
            f"{what}: scores must be finite float32 numbers, at most "
            f"{np.finfo(np.float32).max:.3g} in size, got {given[wrong[0]]} "
            f"for key number {wrong[0]}."
        )
    return scores
