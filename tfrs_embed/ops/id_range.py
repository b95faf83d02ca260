"""Checks that ids are in their features' tables."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.configs import FeatureSpec
from tfrs_embed.kernels import portable_call
from tfrs_embed.ops.checks import Checks, first, message
from tfrs_embed.ops.parsed_ids import ParsedIds, of_one_dtype


def valid(ids: tf.Tensor, vocabulary_size: int) -> tf.Tensor:
    """[n] bool: which ids are in [0, vocabulary_size)."""
    if ids.dtype.is_unsigned or ids.dtype.size < 4:
        # uint64's upper half becomes negative, and stays invalid.
        ids = tf.cast(ids, tf.int64)
    if vocabulary_size > ids.dtype.max:
        return ids >= 0
    return (ids >= 0) & (ids < vocabulary_size)


def checking_kernels(parsed: Sequence[ParsedIds]) -> Any:
    """The kernels' operations if they can check these ids, or None."""
    # Eagerly it is one condition after the other, as they are found.
    if tf.executing_eagerly() or not parsed:
        return None
    if any(each.ids.dtype not in (tf.int32, tf.int64) for each in parsed):
        return None
    # Wherever the tables are: checks read the ids alone.
    return kernels.portable_operations(None)


def require_valid(
    features: Sequence[FeatureSpec],
    parsed: Sequence[ParsedIds],
    checks: Checks,
    training: bool,
) -> None:
    """Adds the conditions that all ids are in their features' tables."""
    sizes = [feature.table.vocabulary_size for feature in features]
    texts = [
        functools.partial(_range_message, feature, each.ids)
        for feature, each in zip(features, parsed, strict=True)
    ]
    module = checking_kernels(parsed)
    if module and training:
        ids = of_one_dtype([each.ids for each in parsed])
        checks.require_all(module.tfrs_embed_inside(ids=ids, rows=sizes), texts)
        return
    for each, size, text in zip(parsed, sizes, texts, strict=True):
        checks.require(tf.reduce_all(valid(each.ids, size)), text)


def require_valid_in_kernel(
    module: Any,
    features: Sequence[FeatureSpec],
    parsed: Sequence[ParsedIds],
    training: bool,
) -> None:
    """Lays ids out as [n], which exist only if they are in their tables.

    One operation that fails by itself, however many features there are. A
    branch, which replicas need to decide together, takes several for each.

    Args:
        module: the kernels' operations.
        features: the features.
        parsed: their ids, int32 or int64.
        training: whether this is part of a training step.
    """

    def kernel(*ids: tf.Tensor) -> list[tf.Tensor]:
        return module.tfrs_embed_require(
            ids=ids,
            rows=[feature.table.vocabulary_size for feature in features],
            names=[str(feature) for feature in features],
        )

    def stock(*ids: tf.Tensor) -> list[tf.Tensor]:
        copies = [
            dataclasses.replace(each, ids=i)
            for each, i in zip(parsed, ids, strict=True)
        ]
        for each in copies:
            each.flatten()
        checks = Checks()
        require_valid(features, copies, checks, training=False)
        return checks.guard([each.ids for each in copies])

    ids = of_one_dtype([each.ids for each in parsed])
    rows = kernel(*ids) if training else portable_call.call(stock, kernel, ids)
    for each, row in zip(parsed, rows, strict=True):
        each.ids = row


def _range_message(feature: FeatureSpec, ids: tf.Tensor) -> tf.Tensor:
    size = feature.table.vocabulary_size
    return message(
        f"{feature}: id ",
        first(ids, ~valid(ids, size)),
        f" is out of range; the table has {size} rows, valid ids are 0 to "
        f"{size - 1}.",
    )
