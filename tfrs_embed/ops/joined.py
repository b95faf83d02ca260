"""Values of several features one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.ops.bags import bag_of_id, concat, num_rows


class Joined:
    """Values of several features one after the other.

    What is done with all of them at once takes a few operations. Features by
    themselves take as many each, which is most of what tracing them takes.

    Args:
        features: the features.
        parts: each feature's [n, ...], of one dtype and rank.

    Attributes:
        parts: these.
        values: all values, [sum of n, ...].
        lengths: the length of each feature's part, [features] int32.
    """

    def __init__(
        self, features: Sequence[Any], parts: Sequence[tf.Tensor]
    ) -> None:
        self.parts = parts
        self._names = [str(feature) for feature in features]
        # Joined outside of the branch that words an error: inside it, each part
        # would be one more input of the branch.
        self.values = concat(parts)
        self.lengths = num_rows(parts)

    def feature_of_row(self) -> tf.Tensor:
        """The number of each value's feature, [sum of n] int32."""
        if len(self.parts) == 1:
            return tf.zeros(tf.shape(self.parts[0])[:1], tf.int32)
        return bag_of_id(tf.concat([[0], tf.cumsum(self.lengths)], 0))

    def part(self, number: tf.Tensor) -> tf.Tensor:
        """The values of the feature of that number, [n, ...]."""
        begin = tf.cumsum(self.lengths, exclusive=True)[number]
        return self.values[begin : begin + self.lengths[number]]

    def name(self, number: tf.Tensor) -> tf.Tensor | str:
        """The name of the feature of that number."""
        # TensorFlow's bridge for TPUs leaves constants of a text behind when it
        # moves a check to the host; there each feature is checked by itself.
        one = len(self._names) == 1
        return self._names[0] if one else tf.gather(self._names, number)
