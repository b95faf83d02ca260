"""An update of a stack that waits for the next step's lookup."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.compat.unmirrored import UnmirroredVariable


class Update(NamedTuple):
    """An update of a stack, computed and not yet applied.

    Attributes:
        rows: [n] int32, unique, among the rows of all chips.
        gradients: [n, dim] float32.
        rate: the learning rate, a scalar float32, or each chip's, [chips].
    """

    rows: tf.Tensor
    gradients: tf.Tensor
    rate: tf.Tensor


class DeferredUpdate:
    """The deferred update of a stack, if there is one.

    Args:
        dim: the stack's width.
        rate_shape: the shape of a learning rate.
    """

    def __init__(self, dim: int, rate_shape: tuple[int, ...] = ()) -> None:
        self._update = Update(
            _variable(tf.zeros([0], tf.int32), [None]),
            _variable(tf.zeros([0, dim]), [None, dim]),
            _variable(tf.zeros(rate_shape), rate_shape),
        )
        # The number of rows that wait. No empty tensor is assigned instead:
        # Grappler assumes that all values assigned to a variable have one
        # shape, and would take the number of rows for 0.
        self._size = _variable(tf.constant(0), ())

    def put(self, update: Update) -> None:
        """Defers an update, in place of any other."""
        for kept, tensor in zip(self._update, update, strict=True):
            kept.assign(tensor)
        self._size.assign(tf.size(update.rows))

    def take(self) -> Update:
        """Returns the deferred update, and forgets it."""
        size = self._size.read_value()
        self._size.assign(0)
        rows, gradients, rate = (v.read_value() for v in self._update)
        return Update(rows[:size], gradients[:size], rate)


def _variable(
    value: tf.Tensor, shape: tuple[int | None, ...] | list[int | None]
) -> tf.Variable:
    return UnmirroredVariable(value, shape=shape, trainable=False)
