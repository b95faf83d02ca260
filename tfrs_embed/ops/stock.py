"""A step's operations in TensorFlow; these define the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.ops import (
    bag_matrix,
    gradient_sums,
    id_range,
    messages,
)
from tfrs_embed.ops import lookup as lookups
from tfrs_embed.ops import update as updates_of
from tfrs_embed.ops.bags import concat, of_one_dtype
from tfrs_embed.ops.update import (
    GradientContributions,
    TableUpdate,
    update_unique,
)

#: A key of SipHash; None: FarmHash.
Salt = tuple[int, int] | None


class Stock:
    """TensorFlow's operations, on any device; kernels replace some of them.

    Attributes:
        compiled: whether these are kernels. They take bags by splits and ids of
            64 bits, and add a row's gradients in order, with any number of
            threads.
        checks_ids: whether one operation, `require`, checks a graph's ids.
    """

    compiled = False
    checks_ids = False

    fill: Callable[..., tf.Tensor] = staticmethod(tf.fill)
    require = staticmethod(id_range.require)
    # Returns whether ids are in their tables, for all features or for each.
    inside = staticmethod(id_range.RangeCheck.all_valid)
    lookup = staticmethod(lookups.lookup)
    lookup_stored = staticmethod(lookups.lookup_stored)
    combine = staticmethod(lookups.combine_all)
    sum_gradients_by_row = staticmethod(gradient_sums.sum_gradients_by_row)
    ids_of_shard = staticmethod(bag_matrix.ids_of_shard)
    route = staticmethod(messages.route)
    write_keys = staticmethod(messages.write_keys)
    read_keys: Callable[..., Any] = staticmethod(messages.read_keys)
    copy_runs: Callable[..., tf.Tensor] = staticmethod(messages.copy_runs)
    pad_runs = staticmethod(messages.pad_runs)
    read_splits: Callable[..., tf.Tensor] = staticmethod(messages.read_splits)

    def hash_ids(
        self, ids: tf.Tensor, buckets: int, salts: Sequence[Salt]
    ) -> list[tf.Tensor]:
        """Returns a hash in [0, buckets) of the ids' texts for each salt.

        The hashes are int64 of the shape of the ids, integers or strings.
        """
        text = ids if ids.dtype == tf.string else tf.strings.as_string(ids)
        return [
            tf.strings.to_hash_bucket_fast(text, buckets)
            if salt is None
            else tf.strings.to_hash_bucket_strong(text, buckets, list(salt))
            for salt in salts
        ]

    def read_rows(
        self, tables: Sequence[tf.Variable], rows: tf.Tensor, dtype: tf.DType
    ) -> tf.Tensor | None:
        """Reads tables' rows, numbered one table after the other, [n, dim].

        Only kernels can; else it returns None.
        """
        return None

    def row_gradients(
        self, contributions: GradientContributions
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sums a table's gradients by row, over all its features.

        Returns:
            The unique ids, [rows], in the order of their first occurrence, and
            their summed gradients, [rows, dim] float32.
        """
        bags, gradients, *_ = contributions
        ids = concat(of_one_dtype([b.ids for b in bags]))
        unique, index = tf.unique(ids)
        size = tf.size(unique)
        return unique, self.sum_gradients_by_row(gradients, bags, index, size)

    def update(self, updates: Sequence[TableUpdate]) -> None:
        """Updates the rows with gradients, and their slots."""
        for group in updates_of.alike(updates):
            if len(group) == 1:
                [each] = group
                update_unique(each, *self.row_gradients(each.contributions))
            else:
                updates_of.update_together(group, self.sum_gradients_by_row)
