"""A table inside a SparseCore stack, seen as one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.rows import HeldRows, scatter
from tfrs_embed.engines.tables.composite import CompositeTable
from tfrs_embed.sparsecore.layout import flat_rows


class StackedTable(CompositeTable):
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

    def read_rows(self, start: int, size: int) -> tf.Tensor:
        """See the base class."""
        self._require_values()
        found = np.empty([size, self.shape[1]], np.float32)
        for variable, own, places in self._by_chip(start, size):
            with tf.device(variable.device):
                rows = tf.gather(variable, tf.constant(places)).numpy()
            found[own] = rows[:, : self.shape[1]]
        with tf.device("CPU:0"):
            return tf.constant(found)

    def held(self) -> list[HeldRows]:
        """See the base class."""
        self._require_values()
        rows, dim = self.shape.as_list()

        def gather(wanted: np.ndarray) -> tf.Tensor:
            return self.gather(tf.constant(wanted, tf.int64))

        return [HeldRows(rows, rows * dim * self.dtype.size, gather)]

    def write_rows(self, start: int, rows: tf.Tensor) -> None:
        """See the base class."""
        padding = self._variables[0].shape[1] - self.shape[1]
        for variable, own, places in self._by_chip(start, rows.shape[0]):
            with tf.device("CPU:0"):
                padded = tf.pad(tf.gather(rows, own), [[0, 0], [0, padding]])
            scatter(variable, tf.constant(places), padded)

    def _by_chip(
        self, start: int, size: int
    ) -> Iterator[tuple[tf.Variable, np.ndarray, np.ndarray]]:
        """Yields each chip's variable, which rows it has, and where."""
        rows = flat_rows(self.layout, np.arange(start, start + size))
        for chip, variable in enumerate(self._variables):
            own = np.flatnonzero(rows // self._rows_per_chip == chip)
            yield variable, own, rows[own] % self._rows_per_chip

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
