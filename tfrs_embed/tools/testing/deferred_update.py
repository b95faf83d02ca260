"""A stack's update that waits for the next step's lookup."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.compat.unmirrored import UnmirroredVariable


class StackUpdate(NamedTuple):
    """A stack's update, computed and not applied.

    `rows` [n] int32 are unique rows of all chips, `gradients` [n, dim] float32;
    `rate` is the learning rate, a scalar float32.
    """

    rows: tf.Tensor
    gradients: tf.Tensor
    rate: tf.Tensor


class DeferredUpdate:
    """Variables that hold at most one update of a stack of width `dim`."""

    def __init__(self, dim: int) -> None:
        self._update = StackUpdate(
            _variable(tf.zeros([0], tf.int32), [None]),
            _variable(tf.zeros([0, dim]), [None, dim]),
            _variable(tf.constant(0.0), []),
        )
        # The number of deferred rows. Assigning empty tensors instead would be
        # wrong: Grappler assumes that all values assigned to a variable have
        # one shape, and would take the number of rows for 0.
        self._size = _variable(tf.constant(0), [])

    def put(self, update: StackUpdate) -> None:
        """Stores an update, in place of any other."""
        for kept, tensor in zip(self._update, update, strict=True):
            kept.assign(tensor)
        self._size.assign(tf.size(update.rows))

    def take(self) -> StackUpdate:
        """Returns the deferred update and removes it."""
        size = self._size.read_value()
        self._size.assign(0)
        rows, gradients, rate = (v.read_value() for v in self._update)
        return StackUpdate(rows[:size], gradients[:size], rate)


def _variable(value: tf.Tensor, shape: list[int | None]) -> tf.Variable:
    return UnmirroredVariable(value, shape=shape, trainable=False)
