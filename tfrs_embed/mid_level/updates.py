"""Updates of stacks, at once or a step late."""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.ops.update import (
    GradientContributions,
    TableUpdate,
    update_unique,
)
from tfrs_embed.optimizers.rules import UpdateRule
from tfrs_embed.sparsecore import pipelining
from tfrs_embed.sparsecore.deferred_update import DeferredUpdate, Update


class Trained(NamedTuple):
    """A stack that is trained.

    Attributes:
        variables: its parameters and slots by name, each [rows, dim].
        rule: its update rule.
    """

    variables: dict[str, Any]
    rule: UpdateRule


class Updater:
    """Updates stacks, and keeps deferred updates.

    In a pipelined loop, SparseCores look up step i + 1 while the update of step
    i waits for the dense part: it is made after that lookup, on the tables as
    they are then, and the last one at the loop's end. Off the TPU that is one
    update kept from each step to the next.

    Args:
        stacks: the trained stacks by name.
        pipelined: whether updates in loops are deferred.
    """

    def __init__(self, stacks: dict[str, Trained], pipelined: bool) -> None:
        self._stacks = stacks
        self._late: dict[str, DeferredUpdate] = {}
        if pipelined:
            for name, stack in stacks.items():
                self._late[name] = DeferredUpdate(
                    stack.variables["parameters"].shape[1]
                )

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
            pipelining.around_loop(self.drain)

    def drain(self) -> None:
        """Makes the deferred updates."""
        for name, late in self._late.items():
            self._apply(name, late.take())

    def _apply(self, name: str, update: Update) -> None:
        stack = self._stacks[name]
        change = TableUpdate(
            stack.variables,
            stack.rule,
            update.rate,
            GradientContributions([], []),
        )
        update_unique(change, update.rows, update.gradients)
