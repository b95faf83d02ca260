"""Marks of the rows that have changed: one byte for each row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.compat.unmirrored import make_variable
from tfrs_embed.ops.bags import of_one_dtype


class RowMarks:
    """The marks of the rows of a store's tables, [rows] uint8 each.

    `rows` has the tables' numbers of rows; `growing` names tables that may grow
    (`MemoryRows.resize`).
    """

    def __init__(
        self,
        device: str | None,
        rows: Mapping[str, int],
        growing: Sequence[str] = (),
    ) -> None:
        self._device = device
        with tf.init_scope(), tf.device(device):
            self._present = make_variable(tf.constant(1, tf.uint8), "moment")
            self.variables = {
                table: make_variable(
                    tf.zeros([number], tf.uint8),
                    f"{table}/marks",
                    [None] if table in growing else None,
                )
                for table, number in rows.items()
            }

    def begin(self, mark: int) -> None:
        """Makes rows that change from now on get another mark."""
        self._present.assign(mark)

    def mark(self, rows: Mapping[str, Sequence[tf.Tensor]]) -> None:
        """Marks tables' rows, vectors of int32 or int64 that may repeat."""
        rows = {table: each for table, each in rows.items() if each}
        if not rows:
            return
        present = self._present.read_value()
        handles = [self.variables[table].handle for table in rows]
        module = kernels.operations(self._device)
        if module is not None:
            module.tfrs_embed_mark(
                marks=handles,
                mark=present,
                rows=[ids for each in rows.values() for ids in each],
                table_of=[
                    t for t, each in enumerate(rows.values()) for _ in each
                ],
            )
            return
        for handle, each in zip(handles, rows.values(), strict=True):
            tf.raw_ops.ResourceScatterUpdate(
                resource=handle,
                indices=tf.concat(of_one_dtype(each), 0),
                updates=present,
            )

    def mark_some(self, table: str, rows: tf.Tensor | None) -> None:
        """Marks rows of a table; None: all."""
        if rows is not None:
            self.mark({table: [tf.reshape(rows, [-1])]})
            return
        marks = self.variables[table]
        marks.assign(tf.fill(tf.shape(marks), self._present.read_value()))

    def clear(self, table: str) -> None:
        """Makes all rows of a table unchanged."""
        marks = self.variables[table]
        marks.assign(tf.zeros_like(marks))

    def above(self, table: str, mark: int) -> np.ndarray:
        """Returns the rows whose mark is above one, [n] int64 ascending."""
        return np.flatnonzero(self.variables[table].numpy() > mark)

    def renumber(self, marks: np.ndarray) -> None:
        """Replaces each mark by `marks[mark]`."""
        for variable in self.variables.values():
            variable.assign(marks[variable.numpy()])
