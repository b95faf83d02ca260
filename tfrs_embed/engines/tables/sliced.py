"""A table whose columns are spread over replicas, seen as one."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.checkpoint.bundle import blocks
from tfrs_embed.checkpoint.rows import scatter
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
        shape: [vocabulary_size, dim].
        ranks: the ranks of the replicas that have slices, from the first
            column on.
        slices: the variables of this process's replicas, None of those that
            have none.
        replicas: the replicas.
        strategy: the strategy it was made under.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        ranks: Sequence[int],
        slices: Sequence[tf.Variable | None],
        replicas: Replicas,
        strategy: tf.distribute.Strategy,
    ) -> None:
        held = [v for v in slices if v is not None]
        super().__init__(name, shape, held, replicas, strategy)
        self._ranks = tuple(ranks)
        self._width = shape[1] // len(ranks)
        # The local replicas that have one.
        self._holders = [i for i, v in enumerate(slices) if v is not None]
        self._block = min(
            shape[0],
            max(1, BLOCK_ELEMENTS // self._width // replicas.world),
        )
        self._channel = replicas.allocate(1)
        self._gather = BlockFunction(self._gather_block)

    def _slice_of(self, rank: int) -> tf.Variable | None:
        """A rank's slice, if it is of this process."""
        for holder, variable in zip(
            self._holders, self._variables, strict=True
        ):
            if self._replicas.ranks[holder] == rank:
                return variable
        return None

    def _columns(self, rank: int) -> tuple[int, int]:
        """The first column that a rank holds, and the one after its last."""
        first = self._ranks.index(rank) * self._width
        return first, first + self._width

    def read_rows(self, start: int, size: int) -> tf.Tensor:
        """Returns rows, [size, dim] float32, in the host's memory.

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
                by_rank = tf.reshape(gathered, [-1, self._block, self._width])
                columns = [by_rank[rank] for rank in self._ranks]
                block = tf.concat(columns, 1)
                parts.append(block[first - row : end - row])
        with tf.device("CPU:0"):
            return tf.concat(parts, 0)

    def write_rows(self, start: int, rows: tf.Tensor) -> None:
        """Sets those columns of some rows that are this process's.

        Args:
            start: the first row's index.
            rows: [n, dim].
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
                for start, size in blocks(variable.shape, tf.float32):
                    block = _read(variable, start, size)
                    writer.add_rows(
                        key, shape, start, block, self._columns(rank)[0]
                    )

    def _gather_block(self, start: tf.Tensor) -> tf.Tensor:
        """A block of rows of all replicas; zeros of those that have none."""
        slices = dict(zip(self._holders, self._variables, strict=True))
        gathered = []
        for i in range(self._replicas.local):
            if i in slices:
                rows = start + tf.range(self._block)
                block = tf.gather(slices[i], rows)
            else:
                block = tf.zeros([self._block, self._width])
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
    columns: tuple[int, int],
    start: int,
    rows: tf.Tensor,
) -> None:
    """Sets rows of a slice to their columns of a table's rows.

    Args:
        variable: the slice, [vocabulary_size, width].
        columns: its first column in the table, and the one after its last.
        start: the first row's index.
        rows: [n, dim], all columns.
    """
    first, end = columns
    with tf.device("CPU:0"):
        mine = rows[:, first:end]
    scatter(variable, tf.range(start, start + rows.shape[0]), mine)
