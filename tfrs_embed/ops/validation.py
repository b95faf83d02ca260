"""Requires ids to be in their tables before any table is touched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.strategies import in_xla
from tfrs_embed.ops import backend
from tfrs_embed.ops.bags import of_one_dtype
from tfrs_embed.ops.checks import Checks, Condition, EarlyLookup
from tfrs_embed.ops.grouping import Layouts
from tfrs_embed.ops.id_range import RangeCheck
from tfrs_embed.ops.parsed_ids import ParsedIds

# The dtypes of ids that are checked for several features at once.
_JOINABLE = (tf.int32, tf.int64)


def validate(
    parsed: Sequence[ParsedIds],
    invalid_ids: str,
    checks: Checks,
    training: bool,
    layouts: Layouts,
) -> None:
    """Flattens ids to [n] and guards all parsed tensors by all conditions.

    `checks` has the conditions of parsing. Ids outside of tables are an error
    or, with invalid_ids="zero", absent.
    """
    require = invalid_ids == "error"
    if in_xla():
        # `ops.xla` has what few programs need.
        from tfrs_embed.ops.xla import mark

        mark(parsed, checks, require, layouts)
        return
    operations = backend.operations(None, training)
    numbers = [each for each in parsed if each.is_number]
    at_once = (
        require
        and operations.checks_ids
        and bool(numbers)
        and not tf.executing_eagerly()
        and all(each.ids.dtype in _JOINABLE for each in numbers)
    )
    if not at_once:
        flatten(parsed, invalid_ids, checks, training, layouts)
    guard(parsed, checks)
    if at_once:
        ids = of_one_dtype([each.ids for each in numbers])
        found = operations.require([each.feature for each in numbers], ids)
        for each, valid_ids in zip(numbers, found, strict=True):
            each.ids = valid_ids
        # A bad id of one table fails the step before keys of another table are
        # counted or hashed rows are read.
        with tf.control_dependencies(found):
            for each in parsed:
                if not each.is_number:
                    each.flatten(layouts)


def flatten(
    parsed: Sequence[ParsedIds],
    invalid_ids: str,
    checks: Checks,
    training: bool,
    layouts: Layouts,
) -> None:
    """Flattens ids to [n], and adds the condition that tables have them."""
    for each in parsed:
        each.flatten(layouts)
    if invalid_ids == "error":
        numbers = [each for each in parsed if each.is_number]
        require_valid(numbers, checks, training)


def require_valid(
    parsed: Sequence[ParsedIds], checks: Checks, training: bool
) -> None:
    """Requires ids, [n] row numbers of each feature, to be in their tables."""

    def conditions(parsed: Sequence[ParsedIds]) -> list[Condition]:
        check = RangeCheck([p.feature for p in parsed], [p.ids for p in parsed])
        if len(parsed) == 1:
            return [(tf.reduce_all(check.valid()), check.message)]
        return [
            (backend.operations(None, training).inside(check), check.message)
        ]

    for each in parsed:
        key = None if each.ids.dtype in _JOINABLE else str(each.feature)
        checks.require_together(conditions, key, each)


def guard(
    parsed: Sequence[ParsedIds],
    checks: Checks,
    early: EarlyLookup | None = None,
) -> tuple[list[tf.Tensor], Any]:
    """Guards the parsed tensors; returns those of `early`, and the sizes.

    See `Checks.guard_with`.
    """
    names = ("ids", "bag_ids", "weights", "shape", "kept", "splits")
    places = [
        (each, name)
        for each in parsed
        for name in names
        if tf.is_tensor(getattr(each, name))
    ]
    tensors = [getattr(*place) for place in places]
    guarded, longest = checks.guard_with(tensors, early)
    for (each, name), tensor in zip(places, guarded, strict=False):
        setattr(each, name, tensor)
    return guarded[len(places) :], longest
