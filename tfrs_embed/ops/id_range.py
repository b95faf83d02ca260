"""Which ids are in their features' tables."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.configs import FeatureSpec
from tfrs_embed.ops.bags import bag_of_id, num_elements, of_one_dtype
from tfrs_embed.ops.checks import Checks, first, message


def valid(ids: tf.Tensor, vocabulary_size: int) -> tf.Tensor:
    """[n] bool: which ids are in [0, vocabulary_size)."""
    if ids.dtype.is_unsigned or ids.dtype.size < 4:
        # uint64's upper half becomes negative, and stays invalid.
        ids = tf.cast(ids, tf.int64)
    if vocabulary_size > ids.dtype.max:
        return ids >= 0
    return (ids >= 0) & (ids < vocabulary_size)


class Row:
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
        return bag_of_id(
            tf.concat([[0], tf.cumsum(num_elements(self.parts))], 0)
        )


def require(
    features: Sequence[FeatureSpec], ids: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """Returns ids, [n] each, which exist only if all are in their tables.

    Args:
        features: the features.
        ids: their ids, int32 or int64.
    """
    row = Row(features, ids)
    checks = Checks()
    checks.require(row.valid(), row.message)
    [guarded] = checks.guard([row.all()])
    if len(ids) == 1:
        return [guarded]
    return tf.split(guarded, num_elements(row.parts), num=len(ids))


def outside(feature: FeatureSpec, ids: tf.Tensor) -> tf.Tensor:
    """The text of the error of a feature's first id that isn't in its table."""
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
