"""Bags as rows of samples, the forms in which TPUs take ids."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.ops.bags import BaggedIds


def as_ragged(
    bags: BaggedIds, samples: int | tf.Tensor
) -> tuple[tf.RaggedTensor, tf.RaggedTensor | None]:
    """Returns ids, int32 [samples, None], and weights, float32 or None.

    Rows beyond the bags are empty.
    """
    splits = tf.searchsorted(
        bags.bag_of_id(), tf.range(samples + 1, dtype=tf.int32)
    )
    ids = tf.RaggedTensor.from_row_splits(
        tf.cast(bags.ids, tf.int32), splits, validate=False
    )
    if bags.weights is None:
        return ids, None
    return ids, ids.with_values(bags.weights)


class SampleMatrix(NamedTuple):
    """Bags as a matrix with a row for each, as wide as the longest bag.

    If the longest bag isn't known when tracing, the width is rounded up to a
    power of two: a TPU's program is compiled anew for each width.

    Attributes:
        ids: [samples, width] int32; 0 where there is none.
        gains: [samples, width] float32, the factor of each id's row.
        mask: [samples, width] float32, 1 where there is an id, else 0.
    """

    ids: tf.Tensor
    gains: tf.Tensor
    mask: tf.Tensor

    @classmethod
    def of_bags(cls, bags: BaggedIds, samples: int | tf.Tensor) -> SampleMatrix:
        """Lays bags out in `samples` rows; those beyond the bags are empty."""
        ids, weights = as_ragged(bags, samples)
        there = ids.with_values(tf.ones_like(ids.values, tf.float32))
        gains = there if weights is None else weights
        fixed = samples if isinstance(samples, int) else None
        static = [fixed, bags.max_bag_size[0]]
        shape: Any = static
        if static[1] is None:
            longest = tf.cast(tf.reduce_max(ids.row_lengths()), tf.int32)
            powers = tf.constant([2**i for i in range(31)])
            width = powers[tf.searchsorted(powers, longest[None])[0]]
            shape = tf.stack([ids.nrows(tf.int32), width])
        made = cls(
            *(
                tf.ensure_shape(ragged.to_tensor(shape=shape), static)
                for ragged in (ids, gains, there)
            )
        )
        if bags.scale is None:
            return made
        padding = [[0, samples - bags.count]]
        scale = tf.pad(bags.scale, padding)
        return made._replace(gains=made.gains * scale[:, None])

    def combine(self, rows: tf.Tensor) -> tf.Tensor:
        """Combines the ids' rows, [samples, width, dim], over the width."""
        gains = tf.cast(self.gains, rows.dtype)
        return tf.reduce_sum(rows * gains[:, :, None], 1)
