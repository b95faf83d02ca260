"""Checks that ids are in their features' tables."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.compat.graphs import NOT_INLINED
from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.ops.bags import concat, of_one_dtype
from tfrs_embed.ops.checks import FeatureValues, first, message


def valid(ids: tf.Tensor, vocabulary_size: int) -> tf.Tensor:
    """Returns which ids are in [0, vocabulary_size), bool."""
    if ids.dtype.is_unsigned or ids.dtype.size < 4:
        # uint64's upper half becomes negative, and stays invalid.
        ids = tf.cast(ids, tf.int64)
    if vocabulary_size > ids.dtype.max:
        return ids >= 0
    return (ids >= 0) & (ids < vocabulary_size)


class RangeCheck(FeatureValues):
    """The check of ids of several features, concatenated, int32 or int64."""

    def __init__(
        self, features: Sequence[FeatureSpec], ids: Sequence[tf.Tensor]
    ) -> None:
        self.sizes = [feature.table.vocabulary_size for feature in features]
        if len(ids) > 1 and max(self.sizes) > tf.int32.max:
            ids = [tf.cast(i, tf.int64) for i in ids]
        flat = [i if i.shape.rank == 1 else tf.reshape(i, [-1]) for i in ids]
        super().__init__(features, of_one_dtype(flat))

    def valid(self) -> tf.Tensor:
        """Returns which ids are in their features' tables, [n] bool."""
        if len(self.parts) == 1:
            return valid(self.parts[0], self.sizes[0])
        ids = self.values
        sizes = tf.constant(self.sizes, ids.dtype)
        return (ids >= 0) & (ids < tf.gather(sizes, self.feature_of_row()))

    def all_valid(self) -> tf.Tensor:
        """Returns whether all ids are in their features' tables, bool."""
        if len(self.parts) == 1:
            return tf.reduce_all(self.valid())
        # Takes less time than a size for each id.
        parts: dict[int, list[tf.Tensor]] = {}
        for part, size in zip(self.parts, self.sizes, strict=True):
            parts.setdefault(size, []).append(part)
        if len(parts) == 1:
            largest = [tf.reduce_max(self.values)]
        else:
            largest = [tf.reduce_max(concat(each)) for each in parts.values()]
        below = tf.stack(largest) < tf.constant([*parts], self.values.dtype)
        # GPUs have no minimum of int64.
        return tf.reduce_all(self.values >= 0) & tf.reduce_all(below)

    def message(self) -> tf.Tensor:
        """Returns the error's text for the first id outside its table."""
        # All ids may be valid here if another replica has an invalid id.
        wrong = ~self.valid()
        feature = 0
        if len(self.parts) > 1:
            feature = first(self.feature_of_row(), wrong)
        ends = [
            f" is out of range; the table has {size} rows, valid ids are 0 to "
            f"{size - 1}."
            for size in self.sizes
        ]
        return message(
            self.name(feature),
            ": id ",
            first(self.values, wrong),
            ends[0] if len(ends) == 1 else tf.gather(ends, feature),
        )


def require(
    features: Sequence[FeatureSpec], ids: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns ids, [n] each, guarded to be in their tables; int32 or int64."""
    check = RangeCheck(features, ids)

    # Not inlined: its operations take time where they are skipped, too. But
    # TensorFlow Lite converts no such function.
    inlined = {} if kernels.are_disabled() else NOT_INLINED

    @tf.function(autograph=False, **inlined)
    def fail() -> tf.Tensor:
        failed = tf.debugging.Assert(False, [check.message()])
        with tf.control_dependencies([failed]):
            return tf.constant(False)

    # Ids don't go through the branch, whose outputs would be copies of them.
    valid = tf.cond(check.all_valid(), lambda: tf.constant(True), fail)
    with tf.control_dependencies([valid]):
        return [tf.identity(part) for part in check.parts]
