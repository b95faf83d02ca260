"""Ids that are in their tables, or an error before any table is touched."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.ops import backend
from tfrs_embed.ops.bags import Constants, Validity, of_one_dtype
from tfrs_embed.ops.checks import Checks
from tfrs_embed.ops.grouping import Layouts, group
from tfrs_embed.ops.id_range import Row, valid
from tfrs_embed.ops.parsed_ids import ParsedIds
from tfrs_embed.strategies import in_tpu_replica, in_xla


def validate(
    parsed: Sequence[ParsedIds],
    invalid_ids: str,
    checks: Checks,
    training: bool,
    layouts: Layouts,
) -> None:
    """Lays ids out as [n], which exist only if all conditions hold.

    Args:
        parsed: a call's ids.
        invalid_ids: "error", or "zero": ids outside of tables are absent.
        checks: takes the conditions on ids, and has those of parsing.
        training: whether this is part of a training step.
        layouts: those of the call.
    """
    require = invalid_ids == "error"
    if in_xla():
        _mark(parsed, checks, require, layouts.constants)
        return
    operations = backend.of(None, training)
    numbers = [each for each in parsed if each.is_number]
    consensus = checks.consensus
    at_once = (
        require
        and operations.checks_ids
        and consensus is None
        and bool(numbers)
        and _together(numbers)
    )
    if not at_once:
        for each in parsed:
            each.flatten(layouts.constants)
        if require:
            require_valid(numbers, checks, training)
    if consensus is None:
        _guard(parsed, checks, [])
    else:
        early = consensus.prepare(
            [each.feature for each in parsed],
            group(parsed, layouts, bare=True),
            [each.weights is not None for each in parsed],
        )
        consensus.prepared(_guard(parsed, checks, early))
    if at_once:
        ids = of_one_dtype([each.ids for each in numbers])
        found = operations.require([each.feature for each in numbers], ids)
        for each, valid_ids in zip(numbers, found, strict=True):
            each.ids = valid_ids
        # No key counts in a step that a bad id of another table fails, and no
        # row of a hashed id is read.
        with tf.control_dependencies(found):
            for each in parsed:
                if not each.is_number:
                    each.flatten(layouts.constants)


def require_valid(
    parsed: Sequence[ParsedIds], checks: Checks, training: bool
) -> None:
    """Adds the conditions that all ids are in their features' tables.

    Args:
        parsed: the ids, [n] each, which are numbers of rows.
        checks: takes the conditions.
        training: whether this is part of a training step.
    """
    features = [each.feature for each in parsed]
    # TensorFlow's bridge for TPUs leaves the constants of the row's text behind
    # when it moves a check to the host.
    if len(parsed) < 2 or in_tpu_replica() or not _together(parsed):
        for feature, each in zip(features, parsed, strict=True):
            row = Row([feature], [each.ids])
            checks.require(tf.reduce_all(row.valid()), row.message)
        return
    row = Row(features, [each.ids for each in parsed])
    checks.require(backend.of(None, training).inside(row), row.message)


def _together(parsed: Sequence[ParsedIds]) -> bool:
    """Whether features' ids can be checked by operations for all of them."""
    # Eagerly it is one condition after the other, as they are found.
    return not tf.executing_eagerly() and all(
        each.ids.dtype in (tf.int32, tf.int64) for each in parsed
    )


def _mark(
    parsed: Sequence[ParsedIds],
    checks: Checks,
    require: bool,
    constants: Constants,
) -> None:
    """Marks ids as valid or not, inside XLA, where nothing can raise."""
    inside = []
    for each in parsed:
        each.flatten(constants)
        size = each.feature.table.vocabulary_size
        inside.append(
            valid(each.ids, tf.int32.max if each.is_position else size)
        )
    shapes_fit = all_valid = checks.hold()
    if require:
        all_valid = tf.reduce_all(
            [all_valid, *(tf.reduce_all(each) for each in inside)]
        )
    for each, mask in zip(parsed, inside, strict=True):
        each.validity = Validity(mask & shapes_fit, all_valid)


def _guard(
    parsed: Sequence[ParsedIds], checks: Checks, others: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Guards the parsed ids' tensors by all conditions, and returns others."""
    names = ("ids", "bag_ids", "weights", "shape", "kept", "splits")
    places = [
        (each, name)
        for each in parsed
        for name in names
        if tf.is_tensor(getattr(each, name))
    ]
    guarded = checks.guard([*(getattr(*place) for place in places), *others])
    for (each, name), tensor in zip(places, guarded, strict=False):
        setattr(each, name, tensor)
    return guarded[len(places) :]
