"""Checks that ids are in their features' tables."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.configs import FeatureSpec
from tfrs_embed.kernels import portable_call
from tfrs_embed.ops.checks import Checks, first, message
from tfrs_embed.ops.parsed_ids import ParsedIds, bag_of_id, of_one_dtype
from tfrs_embed.strategies import in_tpu_replica


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
    """Adds the conditions that all ids are in their features' tables.

    Args:
        features: the features.
        parsed: their ids.
        checks: takes the conditions.
        training: whether this is part of a training step.
    """
    one_by_one = tf.executing_eagerly() or len(features) < 2
    # TensorFlow's bridge for TPUs leaves the constants of the row's text behind
    # when it moves a check to the host.
    one_by_one |= in_tpu_replica()
    if one_by_one or any(
        each.ids.dtype not in (tf.int32, tf.int64) for each in parsed
    ):
        for feature, each in zip(features, parsed, strict=True):
            size = feature.table.vocabulary_size
            checks.require(
                tf.reduce_all(valid(each.ids, size)),
                functools.partial(_range_message, feature, each.ids),
            )
        return
    row = _Row(features, [each.ids for each in parsed])
    module = checking_kernels(parsed)
    oks = (
        module.tfrs_embed_inside(ids=row.parts, rows=row.sizes)
        if module and training
        else row.valid()
    )
    checks.require_all(oks, row.message)


class _Row:
    """Ids of several features one after the other.

    What is done with all of them at once takes a few operations. Features by
    themselves take as many each, which is most of what tracing them takes.

    Args:
        features: the features.
        ids: their ids, int32 or int64.
    """

    def __init__(
        self, features: Sequence[FeatureSpec], ids: Sequence[tf.Tensor]
    ) -> None:
        self.sizes = [feature.table.vocabulary_size for feature in features]
        if max(self.sizes) > tf.int32.max:
            ids = [tf.cast(i, tf.int64) for i in ids]
        self.parts = of_one_dtype(
            [i if i.shape.rank == 1 else tf.reshape(i, [-1]) for i in ids]
        )
        self._names = [str(feature) for feature in features]

    def all(self) -> tf.Tensor:
        """All ids, [n]."""
        return (
            self.parts[0] if len(self.parts) == 1 else tf.concat(self.parts, 0)
        )

    def lengths(self) -> tf.Tensor:
        """The number of each feature's ids, [features] int32."""
        return tf.concat(tf.raw_ops.ShapeN(input=self.parts), 0)

    def valid(self) -> tf.Tensor:
        """Which ids are in their features' tables, [n] bool."""
        if len(self.parts) == 1:
            return valid(self.parts[0], self.sizes[0])
        ids = self.all()
        sizes = tf.constant(self.sizes, ids.dtype)
        return (ids >= 0) & (ids < tf.gather(sizes, self._feature_of_id()))

    def message(self) -> tf.Tensor:
        """The text of the first id's error that is in no table."""
        wrong = tf.where(~self.valid())[:1]
        # Elsewhere there may be none, where another replica has one.
        feature = tf.reduce_sum(tf.gather_nd(self._feature_of_id(), wrong), 0)
        number = tf.reduce_sum(tf.gather_nd(self.all(), wrong), 0)
        ends = [_valid_ids(size) for size in self.sizes]
        return tf.strings.join(
            [
                tf.gather([f"{name}: id " for name in self._names], feature),
                tf.strings.as_string(number),
                tf.gather(ends, feature),
            ]
        )

    def _feature_of_id(self) -> tf.Tensor:
        """The feature of each id, [n] int32."""
        return bag_of_id(tf.concat([[0], tf.cumsum(self.lengths())], 0))


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
        row = _Row(features, ids)
        checks = Checks()
        checks.require_all(row.valid(), row.message)
        [guarded] = checks.guard([row.all()])
        if len(ids) == 1:
            return [guarded]
        return tf.split(guarded, row.lengths(), num=len(ids))

    ids = of_one_dtype([each.ids for each in parsed])
    rows = kernel(*ids) if training else portable_call.call(stock, kernel, ids)
    for each, row in zip(parsed, rows, strict=True):
        each.ids = row


def _range_message(feature: FeatureSpec, ids: tf.Tensor) -> tf.Tensor:
    size = feature.table.vocabulary_size
    return message(
        f"{feature}: id ",
        first(ids, ~valid(ids, size)),
        _valid_ids(size),
    )


def _valid_ids(size: int) -> str:
    """The end of the text of an id's error."""
    return (
        f" is out of range; the table has {size} rows, valid ids are 0 to "
        f"{size - 1}."
    )
