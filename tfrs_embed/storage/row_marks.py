"""Marks of the rows that have changed: one byte for each row."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.unmirrored import make_variable
from tfrs_embed.kernels import handle_packs
from tfrs_embed.ops.update import Marks, scatter_update


class RowMarks:
    """The marks of the rows of a store's tables, [rows] uint8 each.

    `rows` has the tables' numbers of rows; `grow` says whether they may grow
    (`KeyedRows.make_room`).
    """

    def __init__(
        self,
        device: str | None,
        rows: Mapping[str, int],
        grow: bool = False,
    ) -> None:
        with tf.init_scope(), tf.device(device):
            self._present = make_variable(tf.constant(1, tf.uint8), "moment")
            self.variables = {
                table: make_variable(
                    tf.zeros([number], tf.uint8),
                    f"{table}/marks",
                    [None] if grow else None,
                )
                for table, number in rows.items()
            }
        self._pack = handle_packs.HandlePack(self.variables.values())

    def begin(self, mark: int) -> None:
        """Makes rows that change from now on get another mark."""
        self._present.assign(mark)

    def marks_of(self, tables: Iterable[str]) -> list[Marks]:
        """Returns where tables' changes are marked now."""
        mark = self._present.read_value()
        return [Marks(self.variables[table], mark) for table in tables]

    def mark_some(self, table: str, rows: tf.Tensor | None) -> None:
        """Marks rows of a table; None: all."""
        [(marks, mark)] = self.marks_of([table])
        if rows is not None:
            scatter_update(marks, tf.reshape(rows, [-1]), mark)
            return
        marks.assign(tf.fill(tf.shape(marks), mark))

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
