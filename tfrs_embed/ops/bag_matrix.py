"""Bags of several features as one matrix, and one shard's ids of it.

Row b has each feature's b-th bag: its ids, then their weights, if any. A
feature's bags have equally many ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.ops.bags import BaggedIds, concat

# The id in rows beyond a feature's bags.
_NO_ID = -1


class BagColumns(NamedTuple):
    """The columns of one feature.

    Attributes:
        bag_size: the number of ids in each bag.
        weighted: whether each id has a weight.
    """

    bag_size: int
    weighted: bool

    @property
    def width(self) -> int:
        """The number of columns: those of ids, then those of weights."""
        return self.bag_size * (1 + self.weighted)


def pack(
    bags: Sequence[BaggedIds],
    columns: Sequence[BagColumns],
    num_rows: tf.Tensor,
) -> tf.Tensor:
    """Packs bags into a matrix of `num_rows`, at least the largest count.

    Returns:
        [num_rows, sum of widths] float32; ids are integers of the same bits.
    """
    # float32 because GPUs neither pad nor send int32.
    no_id = tf.bitcast(tf.constant(_NO_ID), tf.float32)
    parts = []
    for b, c in zip(bags, columns, strict=True):
        padding = [[0, num_rows - b.count], [0, 0]]
        words = tf.bitcast(tf.cast(b.ids, tf.int32), tf.float32)
        words = tf.reshape(words, [-1, c.bag_size])
        parts.append(tf.pad(words, padding, constant_values=no_id))
        if c.weighted:
            assert b.weights is not None
            weights = tf.reshape(b.weights, [-1, c.bag_size])
            parts.append(tf.pad(weights, padding))
    return concat(parts, 1)


def ids_of_shard(
    matrix: tf.Tensor,
    columns: Sequence[BagColumns],
    world: int,
    shards: Sequence[int],
) -> list[BaggedIds]:
    """Reads the ids whose rows are on one shard of each feature's table.

    Id i is row i // world of shard i % world. `shards` has each feature's
    shard.

    Returns:
        For each feature a bag for each row of the matrix, with the shard's row
        numbers of those of its ids that are there; without scales.
    """
    count = tf.shape(matrix)[0]
    bags = []
    first = 0
    for c, shard in zip(columns, shards, strict=True):
        ids = matrix[:, first : first + c.bag_size]
        # GPUs divide only integers of 64 bits.
        flat = tf.cast(tf.bitcast(tf.reshape(ids, [-1]), tf.int32), tf.int64)
        mine = (flat >= 0) & tf.equal(tf.math.floormod(flat, world), shard)
        kept = tf.where(mine)[:, 0]
        weights = None
        if c.weighted:
            weights = matrix[:, first + c.bag_size : first + c.width]
            weights = tf.gather(tf.reshape(weights, [-1]), kept)
        bags.append(
            BaggedIds.in_one_row(
                tf.math.floordiv(tf.gather(flat, kept), world),
                count,
                bag_ids=tf.cast(kept // c.bag_size, tf.int32),
                weights=weights,
            )
        )
        first += c.width
    return bags
