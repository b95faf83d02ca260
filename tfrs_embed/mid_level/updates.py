"""Updates of stacks, at once or a step late."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

from tfrs_embed.ops.update import Change, Uses, update_unique
from tfrs_embed.optimizers import UpdateRule
from tfrs_embed.sparsecore import pipelining


class Update(NamedTuple):
    """What changes a stack.

    Attributes:
        rows: [n] int32, unique.
        gradients: [n, dim] float32.
        rate: the learning rate, a scalar float32.
    """

    rows: tf.Tensor
    gradients: tf.Tensor
    rate: tf.Tensor


class Trained(NamedTuple):
    """A stack that is trained.

    Attributes:
        variables: its parameters and slots by name, each [rows, dim].
        rule: its update rule.
    """

    variables: dict[str, Any]
    rule: UpdateRule


class Updater:
    """Updates stacks, and keeps updates that are put off.

    In a pipelined loop, SparseCores look up step i + 1 while the update of step
    i waits for the dense part: it is made after that lookup, on the tables as
    they are then, and the last one at the loop's end. Off the TPU that is one
    update kept from each step to the next.

    Args:
        stacks: the trained stacks by name.
        pipelined: whether updates in loops are put off.
    """

    def __init__(self, stacks: dict[str, Trained], pipelined: bool) -> None:
        self._stacks = stacks
        self._late: dict[str, _Late] = {}
        if pipelined:
            for name, stack in stacks.items():
                self._late[name] = _Late(stack.variables["parameters"].shape[1])

    def update(self, updates: dict[str, Update], late: bool) -> None:
        """Updates stacks; none of them before all updates are computed.

        Args:
            updates: each stack's update.
            late: whether to put them off.
        """
        ready = [tensor for update in updates.values() for tensor in update]
        with tf.control_dependencies(ready):
            self.drain()
            for name, update in updates.items():
                if late:
                    self._late[name].put(update)
                else:
                    self._apply(name, update)
        if late:
            pipelining.at_loop_end(self.drain)

    def drain(self) -> None:
        """Makes the updates that have been put off."""
        for name, late in self._late.items():
            self._apply(name, late.take())

    def _apply(self, name: str, update: Update) -> None:
        stack = self._stacks[name]
        change = Change(stack.variables, stack.rule, update.rate, Uses([], []))
        update_unique(change, update.rows, update.gradients)


class _Late:
    """Keeps one update of a stack.

    Args:
        dim: the stack's width.
    """

    def __init__(self, dim: int) -> None:
        self._kept = Update(
            _variable(tf.zeros([0], tf.int32), [None]),
            _variable(tf.zeros([0, dim]), [None, dim]),
            _variable(tf.zeros([]), []),
        )
        # How many of the rows are still to be updated. They are not replaced by
        # none: Grappler takes all that is assigned to a variable to have one
        # shape, and would fold the number of rows to 0.
        self._size = _variable(tf.constant(0), [])

    def put(self, update: Update) -> None:
        for kept, tensor in zip(self._kept, update, strict=True):
            kept.assign(tensor)
        self._size.assign(tf.size(update.rows))

    def take(self) -> Update:
        size = tf.convert_to_tensor(self._size)
        rows, gradients, rate = (tf.convert_to_tensor(v) for v in self._kept)
        self._size.assign(0)
        return Update(rows[:size], gradients[:size], rate)


def _variable(value: tf.Tensor, shape: list[int | None]) -> tf.Variable:
    # The class itself: checkpoints and strategies are to know nothing of it.
    return ResourceVariable(value, shape=shape, trainable=False)
