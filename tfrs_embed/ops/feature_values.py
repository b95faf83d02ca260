"""Values of several features, concatenated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.ops.bags import bag_of_id, concat, num_rows


class FeatureValues:
    """Values of several features, concatenated, of one dtype and rank.

    One operation on all of them traces faster than one for each feature.

    Attributes:
        values: all values, [sum of n, ...].
        lengths: each part's length, [features] int32.
    """

    def __init__(
        self, features: Sequence[Any], parts: Sequence[tf.Tensor]
    ) -> None:
        self.parts = parts
        self._names = [str(feature) for feature in features]
        # Concatenated outside of the branch that words the error, so that the
        # branch has one input instead of one per part.
        self.values = concat(parts)
        self.lengths = num_rows(parts)

    def feature_of_row(self) -> tf.Tensor:
        """Returns the number of each value's feature, [sum of n] int32."""
        if len(self.parts) == 1:
            return tf.zeros(tf.shape(self.parts[0])[:1], tf.int32)
        return bag_of_id(tf.concat([[0], tf.cumsum(self.lengths)], 0))

    def part(self, number: tf.Tensor) -> tf.Tensor:
        """Returns the values of a feature by its number, [n, ...]."""
        begin = tf.cumsum(self.lengths, exclusive=True)[number]
        return self.values[begin : begin + self.lengths[number]]

    def name(self, number: tf.Tensor) -> tf.Tensor | str:
        """Returns a feature's name by its number."""
        # On TPUs features are checked one by one, and constant texts would not
        # reach the host; see `Checks.require_together`.
        one = len(self._names) == 1
        return self._names[0] if one else tf.gather(self._names, number)
