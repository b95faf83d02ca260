"""Bags as rows of samples: the forms that a TPU takes ids in."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.ops.bags import BaggedIds


def as_ragged(
    bags: BaggedIds, samples: int | tf.Tensor
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
    """Bags as a matrix, a row for each, as wide as the longest bag can be.

    Where that is not known, the matrix is as wide as the longest bag of the
    batch, rounded up to a power of two: a TPU's program is compiled anew for
    each width.

    Attributes:
        ids: [samples, width] int32; 0 where there is none.
        gains: [samples, width] float32, what each row is multiplied by.
        mask: [samples, width] float32, 1 where there is an id, else 0.
    """

    ids: tf.Tensor
    gains: tf.Tensor
    mask: tf.Tensor

    @classmethod
    def of(cls, bags: BaggedIds, samples: int | tf.Tensor) -> Matrix:
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
        shape: Any = [fixed, bags.longest]
        if bags.longest is None:
            width = _power_of_two(tf.reduce_max(ids.row_lengths()))
            shape = tf.stack([ids.nrows(tf.int32), width])
        made = cls(
            *(
                tf.ensure_shape(
                    ragged.to_tensor(shape=shape), [fixed, bags.longest]
                )
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


def _power_of_two(least: tf.Tensor) -> tf.Tensor:
    """The smallest power of two that is no smaller, scalar int32."""
    powers = tf.constant([2**i for i in range(31)])
    place = tf.searchsorted(powers, tf.cast(least, tf.int32)[None])[0]
    return powers[place]
