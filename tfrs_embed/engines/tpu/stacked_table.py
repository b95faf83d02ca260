"""A table inside a SparseCore stack, seen as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.engines.whole import WholeTable
from tfrs_embed.ops.update import scatter_update
from tfrs_embed.sparsecore.layout import flat_rows


class StackedTable(WholeTable):
    """A table, or a slot, among the rows of a stack that chips share.

    Args:
        name: the name, "<table>/parameters" or "<table>/<slot>".
        shape: [vocabulary_size, dim].
        chips: the stack's variable on each chip, [rows, padded dim].
        layout: TensorFlow's `SparseCoreTableLayout` of the table.
        strategy: the strategy it was made under.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        chips: Sequence[tf.Variable],
        layout: Any,
        strategy: tf.distribute.Strategy,
    ) -> None:
        super().__init__(name, shape, chips, strategy)
        self.layout = layout
        self._rows_per_chip = int(chips[0].shape[0])

    def numpy(self) -> np.ndarray:
        """The whole table, [vocabulary_size, dim] float32."""
        vocabulary_size, dim = self.shape
        rows = flat_rows(self.layout, np.arange(vocabulary_size))
        stack = np.concatenate([chip.numpy() for chip in self._variables])
        return stack[rows, :dim]

    def gather(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns rows, [n, dim], of ids [n]; reads no others."""
        rows = flat_rows(self.layout, tf.cast(ids, tf.int64))
        chip = tf.cast(rows // self._rows_per_chip, tf.int32)
        count = len(self._variables)
        places = tf.dynamic_partition(tf.range(tf.size(ids)), chip, count)
        found = [
            tf.gather(variable, own)
            for variable, own in zip(
                self._variables,
                tf.dynamic_partition(rows % self._rows_per_chip, chip, count),
                strict=True,
            )
        ]
        return tf.dynamic_stitch(places, found)[:, : self.shape[1]]

    def write(self, start: int, value: tf.Tensor) -> None:
        """Sets the rows from `start` on to a block, [n, dim]."""
        ids = np.arange(start, start + value.shape[0])
        rows = flat_rows(self.layout, ids)
        padding = self._variables[0].shape[1] - self.shape[1]
        for chip, variable in enumerate(self._variables):
            own = np.flatnonzero(rows // self._rows_per_chip == chip)
            with tf.device(variable.device):
                scatter_update(
                    variable,
                    tf.constant(rows[own] % self._rows_per_chip),
                    tf.pad(tf.gather(value, own), [[0, 0], [0, padding]]),
                )

    def _write(self, value: tf.Tensor) -> None:
        self.write(0, value)
