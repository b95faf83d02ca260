"""The variables of stacks, and the tables in them.

A stack's shards follow each other: a chip's shards are a slice of the variable.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import AutoTrackable
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.sparsecore.layout import flat_rows
from tfrs_embed.sparsecore.mid_level import checkpoints
from tfrs_embed.sparsecore.setup import CheckedConfig
from tfrs_embed.storage.initial_values import initial_blocks


class StackedTables(AutoTrackable):
    """The variables of all stacks: parameters and slots.

    Checkpoints have them under the names of TensorFlow's class, with the
    tables' layouts.
    """

    def __init__(self, setup: CheckedConfig) -> None:
        super().__init__()
        self._setup = setup
        self._layout = setup.layout
        self._built = False

    @tf.autograph.experimental.do_not_convert
    def build(self) -> None:
        """Creates the stacks' variables, with a pending restore's values."""
        if self._built:
            return
        with tf.init_scope():
            self._variables = {
                name: self._make_stack(name) for name in self._layout.stacks
            }
            with tf.device("CPU:0"):
                layouts = checkpoints.layouts_to_save(self.embedding_layouts)
            self._track_trackable(layouts, checkpoints.LAYOUTS_KEY)
        self._built = True

    def _make_stack(self, name: str) -> dict[str, tf.Variable]:
        stack = self._layout.stacks[name]
        rule = self._setup.rules[name]
        # TensorFlow's class saves them by these names.
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
        """A stack's initial rows by its tables' initializers; padding is 0."""
        of_stack = self._layout.stacks[stack]
        result = np.zeros((of_stack.rows, of_stack.dim), np.float32)
        for table in of_stack.tables:
            spec = self._setup.tables[table.name]
            where = self.embedding_layouts[table.name]
            for first, block in initial_blocks(spec):
                rows = np.arange(first, first + block.shape[0])
                result[flat_rows(where, rows), : spec.dim] = block
        return result

    def _make_variable(self, name: str, value: tf.Tensor) -> tf.Variable:
        variable = tf.Variable(value, trainable=False, name=name)
        # A build may have failed before, in an initializer.
        self._track_trackable(variable, name, overwrite=True)
        return variable

    @property
    def variables(self) -> dict[str, dict[str, tf.Variable]]:
        """Variables by the stack's name, then "parameters" or a slot's name.

        Each is [rows, dim]: the shards of all chips, end to end.
        """
        self.build()
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

    def _checkpoint_adapter(self, path: str) -> None:
        checkpoints.check_layouts(path, self.embedding_layouts)


def unstack(
    setup: CheckedConfig, variables: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, tf.Tensor]]:
    """Reads tables and slots, [vocabulary_size, dim], by table name.

    `variables` has each stack's parameters and slots by name, [rows, dim].
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
