"""Gradients of several steps, which one update applies."""

from __future__ import annotations

import tensorflow as tf

from tfrs_embed.compat.unmirrored import make_variable
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.update import GradientContributions


class Accumulation:
    """The gradients of a table's rows on one shard, since its last update.

    Args:
        name: the table.
        dim: its width here.
        steps: the number of steps whose mean gradient is applied at once.
    """

    def __init__(self, name: str, dim: int, steps: int) -> None:
        self.steps = steps
        # As many as were looked up: rows may occur several times.
        self._ids = make_variable(
            tf.zeros([0], tf.int64), f"{name}/accumulated_ids", [None]
        )
        self._rows = make_variable(
            tf.zeros([0, dim]), f"{name}/accumulated_gradients", [None, dim]
        )
        self._next = make_variable(
            tf.constant(0, tf.int64), f"{name}/accumulated_until"
        )

    def add(
        self, ids: tf.Tensor, rows: tf.Tensor, step: tf.Tensor
    ) -> GradientContributions:
        """Adds a step's gradients of rows; returns the mean of all so far.

        After an update's step none are left. Those from before a checkpoint was
        restored, or the table was frozen, are dropped.
        """
        before, of_before = self._ids.read_value(), self._rows.read_value()
        follows = tf.equal(self._next.read_value(), step)
        there = tf.where(follows, tf.size(before), 0)
        ids = tf.concat([before[:there], tf.cast(ids, tf.int64)], 0)
        rows = tf.concat([of_before[:there], rows], 0)
        kept = tf.where(is_last(step, self.steps), 0, tf.size(ids))
        with tf.control_dependencies([ids, rows]):
            self._ids.assign(ids[:kept])
            self._rows.assign(rows[:kept])
            self._next.assign(step + 1)
        bags = BaggedIds.of_rows(ids, None, tf.size(ids))
        return GradientContributions([bags], [rows / self.steps])


def is_last(step: tf.Tensor, steps: int) -> tf.Tensor:
    """Whether an update follows a step, in each of so many steps, a bool."""
    return tf.equal((step + 1) % steps, 0)
