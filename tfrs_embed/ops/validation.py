"""Requires ids to be in their tables before any table is touched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.strategies import in_xla
from tfrs_embed.ops import backend
from tfrs_embed.ops.bags import BaggedIds, of_one_dtype, share_operations
from tfrs_embed.ops.checks import Checks, Condition, EarlyLookup
from tfrs_embed.ops.grouping import Layouts, group, lookup_dtype
from tfrs_embed.ops.id_range import RangeCheck
from tfrs_embed.ops.parsed_ids import ParsedIds

# The dtypes of ids that are checked for several features at once.
_JOINABLE = (tf.int32, tf.int64)


@dataclasses.dataclass(frozen=True)
class UncheckedIds:
    """A call's parsed ids, which may be invalid.

    Attributes:
        parsed: the ids of each feature's `bagged` features.
        checks: the conditions that have to hold.
        required: whether ids outside of tables are an error; else they count
            as absent.
        training: whether this is part of a training step.
        layouts: the layouts of bags.
    """

    parsed: Sequence[ParsedIds]
    checks: Checks
    required: bool
    training: bool
    layouts: Layouts = dataclasses.field(default_factory=Layouts)

    def bags(self) -> list[BaggedIds]:
        """Groups the ids as they are to be looked up, without weights."""
        bags = group(self.parsed, self.layouts, bare=True)
        return [
            bag.one_by_one() if each.learns else bag
            for bag, each in zip(bags, self.parsed, strict=True)
        ]

    def agree(self, early: EarlyLookup | None) -> tuple[list[BaggedIds], Any]:
        """Returns the bags, and what `early.finish` returns, of valid ids."""
        agreed = guard(self.parsed, self.checks, early, narrow=True)
        begun = early.finish(*agreed) if early else None
        return group(self.parsed, self.layouts), begun

    def validate(self) -> list[BaggedIds]:
        """Returns the bags of valid ids, without other replicas."""
        if in_xla():
            # `ops.xla` has what few programs need.
            from tfrs_embed.ops.xla import mark

            mark(self.parsed, self.checks, self.required)
            return group(self.parsed, self.layouts)
        operations = backend.operations(None, self.training)
        numbers = [each for each in self.parsed if each.is_number]
        at_once = (
            self.required
            and operations.checks_ids
            and bool(numbers)
            and not tf.executing_eagerly()
            and all(each.ids.dtype in _JOINABLE for each in numbers)
        )
        if not at_once:
            self.flatten()
        guard(self.parsed, self.checks, narrow=not at_once)
        if at_once:
            ids = of_one_dtype([each.ids for each in numbers])
            found = operations.require([each.feature for each in numbers], ids)
            for each, valid_ids in zip(numbers, found, strict=True):
                each.ids = valid_ids
            # A bad id of one table fails the step before keys of another table
            # are counted or hashed rows are read.
            with tf.control_dependencies(found):
                for each in self.parsed:
                    if not each.is_number:
                        each.flatten()
        return group(self.parsed, self.layouts)

    def flatten(self) -> None:
        """Flattens ids to [n], and adds the condition that tables have them."""
        # A constant takes as long to trace as the rest of a feature.
        shape = tf.constant([-1]) if share_operations() else [-1]
        for each in self.parsed:
            each.flatten(shape)
        if self.required:
            numbers = [each for each in self.parsed if each.is_number]
            require_valid(numbers, self.checks, self.training)


def require_valid(
    parsed: Sequence[ParsedIds], checks: Checks, training: bool
) -> None:
    """Requires ids, [n] row numbers of each feature, to be in their tables."""

    def conditions(parsed: Sequence[ParsedIds]) -> list[Condition]:
        check = RangeCheck([p.feature for p in parsed], [p.ids for p in parsed])
        joinable = check.values.dtype in _JOINABLE
        operations = backend.operations(None, training)
        ok = operations.inside(check) if joinable else check.valid()
        return [(tf.reduce_all(ok), check.message)]

    for each in parsed:
        key = None if each.ids.dtype in _JOINABLE else str(each.feature)
        checks.require_together(conditions, key, each)


def guard(
    parsed: Sequence[ParsedIds],
    checks: Checks,
    early: EarlyLookup | None = None,
    narrow: bool = False,
) -> tuple[list[tf.Tensor], Any]:
    """Guards the parsed tensors; returns those of `early`, and the sizes.

    With `narrow` the checks include those of the ids, which become of the
    dtype that is looked up. See `Checks.guard_with`.
    """
    names = ("ids", "bag_ids", "weights", "shape", "kept", "splits")
    places = [
        (each, name)
        for each in parsed
        for name in names
        if tf.is_tensor(getattr(each, name))
    ]
    tensors = [getattr(*place) for place in places]
    dtypes = [
        lookup_dtype(each)
        if narrow and name == "ids" and not each.may_be_absent
        else tensor.dtype
        for (each, name), tensor in zip(places, tensors, strict=True)
    ]
    guarded, longest = checks.guard_with(tensors, early, dtypes)
    for (each, name), tensor in zip(places, guarded, strict=False):
        setattr(each, name, tensor)
    return guarded[len(places) :], longest
