"""The variables of stacks, and the tables in them.

The shards of a stack follow each other, so that a chip's are a slice of its
variable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import strategies
from tfrs_embed.compat.private_tensorflow import AutoTrackable, ShardInfo
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.ops.update import (
    PARAMETERS,
    GradientContributions,
    TableUpdate,
    update_unique,
)
from tfrs_embed.sparsecore import pipelining
from tfrs_embed.sparsecore.deferred_update import DeferredUpdate, Update
from tfrs_embed.sparsecore.layout import flat_rows
from tfrs_embed.sparsecore.mid_level import checkpoints
from tfrs_embed.sparsecore.setup import Setup
from tfrs_embed.sparsecore.topology import Topology
from tfrs_embed.storage.initial_values import initial_blocks, parameters


class StackedTables(AutoTrackable):
    """The variables of all stacks: parameters and slots.

    Checkpoints have them under the names that TF's class gives them, beside the
    tables' layouts.

    In a pipelined loop, SparseCores look up step i + 1 while the update of step
    i waits for the dense part: it is made after that lookup, on the tables as
    they are then, and the last one at the loop's end. Off the TPU that is one
    update kept from each step to the next.

    Args:
        setup: the configuration.
        strategy: the strategy that the variables belong to.
        pipelined: whether updates in loops are deferred.
    """

    def __init__(
        self, setup: Setup, strategy: tf.distribute.Strategy, pipelined: bool
    ) -> None:
        super().__init__()
        self._setup = setup
        self._layout = setup.layout
        self._strategy = strategy
        self._pipelined = pipelined
        # The deferred updates of stacks that are trained. TF would track a
        # dict, and have it in checkpoints.
        self._late: Mapping[str, DeferredUpdate] = MappingProxyType({})
        self._built = False

    @tf.autograph.experimental.do_not_convert
    def build(self) -> None:
        """Creates the stacks' variables, with values that were read before."""
        if self._built:
            return
        with tf.init_scope(), strategies.scope(self._strategy):
            self._variables = {
                name: self._make_stack(name) for name in self._layout.stacks
            }
            if self._pipelined:
                late = {
                    name: DeferredUpdate(self._layout.stacks[name].dim)
                    for name, rule in self._setup.rules.items()
                    if rule is not None
                }
                self._late = MappingProxyType(late)
        with tf.init_scope(), tf.device("CPU:0"):
            self._track_trackable(
                checkpoints.layouts_to_save(self.embedding_layouts),
                checkpoints.LAYOUTS_KEY,
            )
        self._built = True

    def _make_stack(self, name: str) -> dict[str, tf.Variable]:
        stack = self._layout.stacks[name]
        rule = self._setup.rules[name]

        # By these names TF's class saves them and restores them.
        made = {
            slot: self._make_variable(
                f"{name}/{slot}",
                tf.fill([stack.rows, stack.dim], begins.initial),
            )
            for slot, begins in (rule.slots() if rule else {}).items()
        }
        made[PARAMETERS] = self._make_variable(
            name, tf.constant(self._initial_rows(name))
        )
        return made

    def _initial_rows(self, stack: str) -> np.ndarray:
        """Makes a stack's initial rows from its tables' initializers.

        An initializer with a parameter `shard_info` is called for each chip, as
        TF calls it, with a table's padded shape. Others give the table's own
        rows, as every engine draws them. Padding is zero.
        """
        of_stack = self._layout.stacks[stack]
        result = np.zeros((of_stack.rows, of_stack.dim), np.float32)
        for table in of_stack.tables:
            spec = self._setup.tables[table.name]
            where = self.embedding_layouts[table.name]
            blocks: Iterable[tuple[int, Any]] = initial_blocks(spec)
            if "shard_info" in parameters(spec.initializer):
                topology = self._layout.topology
                blocks = [(0, _rows_of_shards(topology, spec, where))]
            for first, block in blocks:
                rows = np.arange(first, first + block.shape[0])
                result[flat_rows(where, rows), : spec.dim] = block
        return result

    def _make_variable(self, name: str, value: tf.Tensor) -> tf.Variable:
        variable = tf.Variable(value, trainable=False, name=name)
        # Building may have failed before, in an initializer.
        self._track_trackable(variable, name, overwrite=True)
        return variable

    @tf.autograph.experimental.do_not_convert
    def drain(self) -> None:
        """Makes the updates that pipelining has deferred.

        The end of a loop does so by itself; an update is left over only where a
        loop was broken off by an error.
        """
        for name, late in self._late.items():
            self._apply(name, late.take())

    def _update(self, updates: dict[str, Update], late: bool) -> None:
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

    def _apply(self, name: str, update: Update) -> None:
        rule = self._setup.rules[name]
        assert rule is not None
        change = TableUpdate(
            dict(self._variables[name]),
            rule,
            update.rate,
            GradientContributions([], []),
        )
        update_unique(change, update.rows, update.gradients)

    def _drain_eagerly(self) -> None:
        # A function that is being traced must not apply updates as a side
        # effect of being asked for its variables.
        if tf.executing_eagerly():
            self.drain()

    @property
    def variables(self) -> dict[str, dict[str, tf.Variable]]:
        """Variables by the stack's name, then "parameters" or a slot's name.

        Each is [rows, dim]: the shards of all chips, end to end.
        """
        self.build()
        self._drain_eagerly()
        return self._variables

    @property
    def embedding_tables(self) -> dict[str, tf.Variable]:
        """The stacks' parameters by the stack's name."""
        return {k: v[PARAMETERS] for k, v in self.variables.items()}

    @property
    def embedding_table_shards(
        self,
    ) -> dict[str, list[tuple[str, tf.Tensor]]]:
        """By stack, each chip's device and shard of the parameters."""
        number = self._layout.topology.chips
        return {
            name: [(table.device, part) for part in tf.split(table, number)]
            for name, table in self.embedding_tables.items()
        }

    @property
    def embedding_layouts(self) -> dict[str, Any]:
        """By table, the `SparseCoreTableLayout`: where its rows are."""
        return self._layout.stacking.table_to_layout

    @property
    def unstacked_variables(self) -> dict[str, dict[str, tf.Tensor]]:
        """By table, its parameters and slots, [vocabulary_size, dim] each."""
        return unstack(self._setup, self.variables)

    @property
    def unstacked_tables(self) -> dict[str, tf.Tensor]:
        """By table, its parameters, [vocabulary_size, dim]."""
        return {k: v[PARAMETERS] for k, v in self.unstacked_variables.items()}

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        # Before tables are saved, and before they are replaced.
        self._drain_eagerly()
        return super()._trackable_children(save_type, **kwargs)

    def _checkpoint_adapter(self, path: str) -> None:
        checkpoints.check_layouts(path, self.embedding_layouts)


def _rows_of_shards(
    topology: Topology, spec: TableSpec, where: Any
) -> np.ndarray:
    """A table's rows, [vocabulary_size, dim], of each chip's call."""
    shape = tuple(where.unsharded_padded_shape)
    per_core = shape[0] // topology.shards
    per_chip = per_core * topology.sparse_cores
    chips = []
    for chip in range(topology.chips):
        first = chip * per_chip - where.sparse_core_shard_rotation * per_core
        info = ShardInfo((per_chip, shape[1]), (first % shape[0], 0))
        rows = np.asarray(
            spec.initializer(shape, dtype=tf.float32, shard_info=info)
        )
        if rows.shape != info.shape or rows.dtype != np.float32:
            raise ValueError(
                f"Table '{spec.name}': its initializer returned {rows.dtype} "
                f"of shape {rows.shape} for the shard of chip {chip}, not "
                f"float32 of shape {info.shape}."
            )
        chips.append(rows)
    ids = np.arange(spec.vocabulary_size)
    shard = (ids + where.sparse_core_shard_rotation) % topology.shards
    places = shard * per_core + ids // topology.shards
    return np.concatenate(chips)[places, : spec.dim]


def unstack(
    setup: Setup, variables: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, tf.Tensor]]:
    """Reads tables and their slots out of the stacks.

    Args:
        setup: the configuration.
        variables: by stack, the parameters and slots by name, [rows, dim] each.

    Returns:
        By table, its parameters and slots, [vocabulary_size, dim] each.
    """
    tables = {}
    for name, spec in setup.tables.items():
        where = setup.layout.stacking.table_to_layout[name]
        rows = flat_rows(where, np.arange(spec.vocabulary_size))
        tables[name] = {
            key: tf.gather(value, rows)[:, : spec.dim]
            for key, value in variables[where.stacked_table_name].items()
        }
    return tables
