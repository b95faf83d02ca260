"""A table whose columns are spread over replicas, seen as one."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import blocks
from tfrs_embed.checkpoint.rows import HeldRows, held_rows, scatter
from tfrs_embed.checkpoint.session import Session
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.engines.tables.spread import (
    BLOCK_ELEMENTS,
    BlockFunction,
    SpreadTable,
)


class SlicedTable(SpreadTable):
    """A table, or a slot, whose columns are shared out among some replicas.

    With several workers, reading it gathers the rows of all: all workers must
    do it. Saving it has each write its own columns.

    Args:
        name: the name, "<table>/parameters" or "<table>/<slot>".
        shape: [vocabulary_size, dim], or [vocabulary_size] of a slot that has
            one number for each row.
        ranks: the ranks of the replicas that have slices, from the first
            column on.
        slices: the variables of this process's replicas, None of those that
            have none.
        replicas: the replicas.
        strategy: the strategy it was made under.
        dtype: the dtype of its numbers.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        ranks: Sequence[int],
        slices: Sequence[tf.Variable | None],
        replicas: Replicas,
        strategy: tf.distribute.Strategy,
        dtype: tf.DType = tf.float32,
    ) -> None:
        held = [v for v in slices if v is not None]
        super().__init__(name, shape, held, replicas, strategy, dtype)
        self._ranks = tuple(ranks)
        # A slot with one number for each row is not cut.
        self._row = tuple(n // len(ranks) for n in shape[1:])
        # The local replicas that have one.
        self._holders = [i for i, v in enumerate(slices) if v is not None]
        self._block = min(
            shape[0],
            max(1, BLOCK_ELEMENTS // math.prod(self._row) // replicas.world),
        )
        self._channel = replicas.allocate(1)
        self._gather = BlockFunction(
            self._gather_block, replicas, f"read '{name}'"
        )

    def _slice_of(self, rank: int) -> tf.Variable | None:
        """A rank's slice, if it is of this process."""
        for holder, variable in zip(
            self._holders, self._variables, strict=True
        ):
            if self._replicas.ranks[holder] == rank:
                return variable
        return None

    def _columns(self, rank: int) -> tuple[int, int] | None:
        """The first column that a rank holds, and the one after its last.

        None: there are no columns.
        """
        if not self._row:
            return None
        [width] = self._row
        first = self._ranks.index(rank) * width
        return first, first + width

    def read_rows(self, start: int, size: int) -> tf.Tensor:
        """Returns rows, [size, dim] or [size], in the host's memory.

        With several workers it is a collective: all must ask for the same.
        """
        if self._replicas.workers == 1:
            found = []
            for rank in self._ranks:
                variable = self._slice_of(rank)
                assert variable is not None
                found.append(_read(variable, start, size))
            with tf.device("CPU:0"):
                return found[0] if len(found) == 1 else tf.concat(found, 1)
        parts = []
        for first in range(start, start + size, self._block):
            # The last block may overlap the one before: all have one shape.
            row = max(0, min(first, self.shape[0] - self._block))
            end = min(first + self._block, start + size)
            gathered = self._gather(row)
            with tf.device("CPU:0"):
                shape = [-1, self._block, *self._row]
                by_rank = tf.reshape(gathered, shape)
                columns = [by_rank[rank] for rank in self._ranks]
                block = (
                    columns[0] if len(columns) == 1 else tf.concat(columns, 1)
                )
                parts.append(block[first - row : end - row])
        with tf.device("CPU:0"):
            return tf.concat(parts, 0)

    def held(self) -> list[HeldRows]:
        """See the base class; with several workers none has whole rows."""
        if self._replicas.workers > 1 and len(self._ranks) > 1:
            return []
        slices = [v for v in map(self._slice_of, self._ranks) if v is not None]
        if not slices:
            return []  # Another worker has all columns.
        columns = [held_rows(v, self.shape[0]) for v in slices]

        def gather(wanted: np.ndarray) -> tf.Tensor:
            found = [each.gather(wanted) for each in columns]
            with tf.device("CPU:0"):
                return tf.concat(found, 1)

        size = sum(each.bytes for each in columns)
        return [HeldRows(self.shape[0], size, gather)]

    def write_rows(self, start: int, rows: tf.Tensor) -> None:
        """Sets those columns of some rows that are this process's.

        Args:
            start: the first row's index.
            rows: [n, dim] or [n].
        """
        for rank in self._ranks:
            variable = self._slice_of(rank)
            if variable is not None:
                write_columns(variable, self._columns(rank), start, rows)

    def save(self, key: str, session: Session) -> None:
        """Writes the table under a key, of several workers each its columns."""
        if self._replicas.workers == 1:
            super().save(key, session)
            return
        writer = session.writer(self._replicas)
        shape = self.shape.as_list()
        for rank in self._ranks:
            variable = self._slice_of(rank)
            if variable is not None:
                columns = self._columns(rank)
                first = columns[0] if columns else None
                for start, size in blocks(variable.shape, self.dtype):
                    block = _read(variable, start, size)
                    writer.add_rows(key, shape, start, block, first)

    def _gather_block(self, start: tf.Tensor) -> tf.Tensor:
        """A block of rows of all replicas; zeros of those that have none."""
        slices = dict(zip(self._holders, self._variables, strict=True))
        gathered = []
        for i in range(self._replicas.local):
            if i in slices:
                rows = start + tf.range(self._block)
                block = tf.gather(slices[i], rows)
            else:
                block = tf.zeros([self._block, *self._row], self.dtype)
            gathered.append(self._replicas.gather(i, block, self._channel))
        return gathered[0]


def _read(variable: tf.Variable, start: int, size: int) -> tf.Tensor:
    """Rows of a variable, in the host's memory; it reads no others."""
    with tf.device(variable.device):
        rows = tf.gather(variable, tf.range(start, start + size))
    with tf.device("CPU:0"):
        return tf.identity(rows)


def write_columns(
    variable: tf.Variable,
    columns: tuple[int, int] | None,
    start: int,
    rows: tf.Tensor,
) -> None:
    """Sets rows of a slice to their columns of a table's rows.

    Args:
        variable: the slice, [vocabulary_size, width].
        columns: its first column in the table, and the one after its last;
            None: the rows have no columns.
        start: the first row's index.
        rows: [n, dim], all columns; [n] if they have none.
    """
    if columns is not None:
        first, end = columns
        with tf.device("CPU:0"):
            rows = rows[:, first:end]
    scatter(variable, tf.range(start, start + rows.shape[0]), rows)
