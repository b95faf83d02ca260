"""Updates of an emulated slice that are held back for a step."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops


class Change(NamedTuple):
    """An update of a stack.

    Attributes:
        rows: the rows it changes, among those of all chips, [n] int32, unique.
        gradients: theirs, [n, dim] float32.
        rates: each chip's learning rate, [chips] float32.
    """

    rows: tf.Tensor
    gradients: tf.Tensor
    rates: tf.Tensor


class Pending:
    """The change of a stack that is held back, if one is.

    Args:
        chips: the number of chips.
        dim: the stack's width.
    """

    def __init__(self, chips: int, dim: int) -> None:
        # How many rows are held is kept apart: where a drained change was
        # replaced by one of no rows, the graph optimizer took that shape for
        # the variables' in the loop as well.
        self._count = _variable(tf.constant(0), [])
        self._held = Change(
            _variable(tf.zeros([0], tf.int32), [None]),
            _variable(tf.zeros([0, dim]), [None, dim]),
            _variable(tf.zeros([chips]), [chips]),
        )

    def exchange(self, change: Change) -> Change:
        """Returns the change that was held back, and holds another."""
        before = self.take()
        self._count.assign(tf.size(change.rows))
        for variable, value in zip(self._held, change, strict=True):
            variable.assign(value)
        return before

    def take(self) -> Change:
        """Returns the change that was held back, and holds none."""
        count = self._count.read_value()
        self._count.assign(0)
        rows, gradients, rates = (v.read_value() for v in self._held)
        return Change(rows[:count], gradients[:count], rates)


def _variable(value: tf.Tensor, shape: list[int | None]) -> tf.Variable:
    # A strategy would mirror a tf.Variable.
    return resource_variable_ops.ResourceVariable(
        value, trainable=False, shape=shape
    )
