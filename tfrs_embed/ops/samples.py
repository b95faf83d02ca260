"""Bags as rows of samples: the forms that a TPU takes ids in."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.ops.bags import Bags


def as_ragged(
    bags: Bags, samples: int | tf.Tensor
) -> tuple[tf.RaggedTensor, tf.RaggedTensor | None]:
    """Returns bags as ragged tensors, a row for each.

    Args:
        bags: the bags.
        samples: the number of rows; those beyond the bags are empty.

    Returns:
        The ids, int32 [samples, None], and their weights, float32, or None.
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


class Matrix(NamedTuple):
    """Bags as a matrix, as wide as the longest of them.

    Attributes:
        ids: [samples, width] int32; 0 where there is none.
        gains: [samples, width] float32, what each row is multiplied by.
        there: [samples, width] float32, 1 where there is an id, else 0.
    """

    ids: tf.Tensor
    gains: tf.Tensor
    there: tf.Tensor

    @classmethod
    def of(cls, bags: Bags, samples: int | tf.Tensor) -> Matrix:
        """Lays bags out.

        Args:
            bags: the bags.
            samples: the number of rows; those beyond the bags are empty.

        Returns:
            The matrix.
        """
        ids, weights = as_ragged(bags, samples)
        there = ids.with_values(tf.ones_like(ids.values, tf.float32))
        gains = there if weights is None else weights
        fixed = samples if isinstance(samples, int) else None
        made = cls(
            *(
                ragged.to_tensor(shape=[fixed, None])
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
        return tf.reduce_sum(rows * self.gains[:, :, None], 1)
