"""A step's operations as TensorFlow has them: these define the numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfrs_embed.ops import (
    bag_matrix,
    gradient_sums,
    id_range,
    messages,
    xla,
)
from tfrs_embed.ops import lookup as lookups
from tfrs_embed.ops import update as updates_of
from tfrs_embed.ops.bags import concat, of_one_dtype
from tfrs_embed.ops.update import (
    GradientContributions,
    TableUpdate,
    update_unique,
)


class Stock:
    """TensorFlow's operations, on any device; kernels replace some of them.

    Attributes:
        compiled: whether kernels do the work. They take bags by their splits
            and ids of 64 bits as they are, and add up a row's gradients in the
            order they are given, whatever the number of threads.
        checks_ids: whether one operation, `require`, checks ids of a graph.
    """

    compiled = False
    checks_ids = False

    require = staticmethod(id_range.require)
    lookup = staticmethod(lookups.lookup)
    combine = staticmethod(lookups.combine_all)
    sum_gradients_by_row = staticmethod(gradient_sums.sum_gradients_by_row)
    ids_of_shard = staticmethod(bag_matrix.ids_of_shard)
    route = staticmethod(messages.route)
    write_keys = staticmethod(messages.write_keys)
    read_keys = staticmethod(messages.read_keys)
    copy_runs = staticmethod(messages.copy_runs)
    pad_runs = staticmethod(messages.pad_runs)
    read_splits: Callable[..., tf.Tensor] = staticmethod(messages.read_splits)

    def inside(self, row: id_range.Row) -> tf.Tensor:
        """Which ids are in their tables: bool, for each id or each feature."""
        return row.valid()

    def row_gradients(
        self, contributions: GradientContributions
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sums a table's gradients row by row, over all its features.

        Args:
            contributions: the contributions to its rows' gradients.

        Returns:
            The unique ids, [rows], in the order they first occur, and their
            summed gradients, [rows, dim] float32.
        """
        bags, gradients, _ = contributions
        ids = concat(of_one_dtype([b.ids for b in bags]))
        unique, index = tf.unique(ids)
        size = tf.size(unique)
        return unique, self.sum_gradients_by_row(gradients, bags, index, size)

    def update(self, updates: Sequence[TableUpdate]) -> None:
        """Updates the rows that gradients are for, of tables and their slots.

        Args:
            updates: the tables, and what updates them.
        """
        # A lookup inside XLA has an update for XLA, wherever that is traced.
        if xla.compiles(b for u in updates for b in u.contributions.bags):
            for each in updates:
                bags, gradients, _ = each.contributions
                size = each.parameters.shape[0]
                update_unique(each, *xla.row_gradients(bags, gradients, size))
            return
        for group in updates_of.alike(updates):
            if len(group) == 1:
                [each] = group
                update_unique(each, *self.row_gradients(each.contributions))
            else:
                updates_of.update_together(group, self.sum_gradients_by_row)
