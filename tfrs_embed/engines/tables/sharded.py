"""A table whose rows are spread over replicas, seen as one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.rows import HeldRows, held_rows, scatter
from tfrs_embed.checkpoint.session import Session
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.engines.hot_rows import HotTable
from tfrs_embed.engines.tables.spread import (
    BLOCK_ELEMENTS,
    BlockFunction,
    SpreadTable,
)


class Copies(NamedTuple):
    """The copies of a table's hot rows, or of their slot.

    Attributes:
        hot: the hot rows.
        variables: the copies of this process's replicas.
        exported: whether a SavedModel needs them: its lookups read shards, but
            apply deferred updates before.
    """

    hot: HotTable
    variables: Sequence[tf.Variable]
    exported: bool


class ShardedTable(SpreadTable):
    """A table, or a slot, whose row i is row i // world of one of the shards.

    That of row 0 is a rank's, those of the next rows the next ranks'. A shard's
    position is how many ranks it is further on: (rank - first_rank) % world.

    With several workers, reading it gathers the rows of all, and saving it has
    each write a part: all workers must do it, as all workers save Keras's
    variables.

    Args:
        name: the name, "<table>/parameters" or "<table>/<slot>".
        shape: [vocabulary_size, dim], or [vocabulary_size] of a slot that has
            one number for each row.
        shards: the variables of this process's replicas.
        replicas: the replicas.
        strategy: the strategy it was made under.
        first_rank: the rank of the replica that has row 0.
        copies: copies of hot rows, which are written with them; None: there
            are none.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        shards: Sequence[tf.Variable],
        replicas: Replicas,
        strategy: tf.distribute.Strategy,
        first_rank: int,
        copies: Copies | None = None,
    ) -> None:
        dtype = shards[0].dtype
        super().__init__(name, shape, shards, replicas, strategy, dtype)
        self._first_rank = first_rank
        self._copies = copies
        self._row = tuple(shape[1:])
        # Rows of each shard that the workers exchange at a time.
        self._block = min(
            shards[0].shape[0],
            max(1, BLOCK_ELEMENTS // math.prod(self._row) // replicas.world),
        )
        self._channel = replicas.allocate(2)
        # Traced when they are needed.
        self._gather = BlockFunction(
            self._gather_block, replicas, f"read '{name}'"
        )
        self._swap = BlockFunction(self._swap_block, replicas, f"save '{name}'")

    @property
    def shards(self) -> tuple[tf.Variable, ...]:
        """The variables of this process's replicas."""
        return tuple(self._variables)

    @property
    def _exported_variables(self) -> Sequence[tf.Variable]:
        copies = self._copies
        if copies is None or not copies.exported:
            return self._variables
        return [*self._variables, *copies.variables]

    def read_rows(self, start: int, size: int) -> tf.Tensor:
        """Returns rows, [size, dim] or [size], in the host's memory.

        With several workers it is a collective: all must ask for the same.
        """
        world = self._replicas.world
        first, last = start // world, -(-(start + size) // world)
        skipped = start - first * world
        if self._replicas.workers == 1:
            shards = dict(self._by_position())
            found = []
            for _, shard in sorted(shards.items()):
                with tf.device(shard.device):
                    found.append(tf.gather(shard, tf.range(first, last)))
            with tf.device("CPU:0"):
                whole = tf.reshape(tf.stack(found, 1), [-1, *self._row])
        else:
            rows = np.empty(
                [last - first, world, *self._row], self.dtype.as_numpy_dtype
            )
            for row in range(first, last, self._block):
                # The last block may overlap the one before: all have one shape.
                row = max(0, min(row, self.shards[0].shape[0] - self._block))
                block = self._gather(row).numpy()
                block = block.reshape(world, self._block, *self._row)
                block = np.roll(block, -self._first_rank, 0).swapaxes(0, 1)
                begin, end = max(row, first), min(row + self._block, last)
                rows[begin - first : end - first] = block[
                    begin - row : end - row
                ]
            with tf.device("CPU:0"):
                whole = tf.constant(rows.reshape(-1, *self._row))
        with tf.device("CPU:0"):
            return whole[skipped : skipped + size]

    def held(self) -> list[HeldRows]:
        """See the base class."""
        world = self._replicas.world
        return [
            # Row i is the shard's whose position is i modulo the world.
            held_rows(shard, -(-(self.shape[0] - position) // world))
            for position, shard in self._by_position()
        ]

    def write_rows(self, start: int, rows: tf.Tensor) -> None:
        """Sets those of some rows that are this process's.

        Args:
            start: the first row's index.
            rows: [n, dim] or [n].
        """
        write_shards(self._by_position(), self._replicas.world, start, rows)
        if self._copies is not None:
            self._copies.hot.write(self._copies.variables, start, rows)

    def save(self, key: str, session: Session) -> None:
        """Writes the table under a key.

        With several workers each writes every world-th block; the rows of a
        block come from all. So each sends and writes as much as it holds.
        """
        if self._replicas.workers == 1:
            super().save(key, session)
            return
        writer = session.writer(self._replicas)
        shape, world = self.shape.as_list(), self._replicas.world
        step = self._block * world
        for start in range(0, self.shards[0].shape[0], step):
            swapped = self._swap(start)
            for rank, rows in zip(self._replicas.ranks, swapped, strict=True):
                row = (start + rank * self._block) * world
                size = min(step, shape[0] - row)
                if size > 0:
                    with tf.device("CPU:0"):
                        rows = tf.identity(rows[:size])
                    writer.add_rows(key, shape, row, rows)

    def _by_position(self) -> Iterator[tuple[int, tf.Variable]]:
        positions = positions_of(self._replicas, self._first_rank)
        return zip(positions, self.shards, strict=True)

    def _gather_block(self, start: tf.Tensor) -> tf.Tensor:
        """A block of rows of all shards, one shard after the other."""
        rows = [
            self._replicas.gather(
                i,
                tf.gather(shard, start + tf.range(self._block)),
                self._channel,
            )
            for i, shard in enumerate(self.shards)
        ]
        return rows[0]

    def _swap_block(self, start: tf.Tensor) -> list[tf.Tensor]:
        """For each local replica, of rank r, a block of the table's rows.

        It is the rows that all shards have at [start + r * block, start +
        (r + 1) * block), in the table's order.
        """
        world = self._replicas.world
        swapped = []
        for i, shard in enumerate(self.shards):
            # Rows beyond the last are cut off by the receiver.
            rows = start + tf.range(world * self._block)
            rows = tf.minimum(rows, shard.shape[0] - 1)
            shape = [world, -1, *self._row]
            mine = tf.reshape(tf.gather(shard, rows), shape)
            got = self._replicas.all_to_all(i, mine, self._channel + 1)
            got = tf.roll(got, -self._first_rank, 0)
            order = [1, 0, *range(2, len(shape))]
            got = tf.transpose(got, order)
            swapped.append(tf.reshape(got, [-1, *self._row]))
        return swapped


def positions_of(replicas: Replicas, first_rank: int) -> list[int]:
    """The positions of the local replicas' shards of a table.

    Args:
        replicas: the replicas.
        first_rank: the rank of the replica that has the table's row 0.
    """
    return [(rank - first_rank) % replicas.world for rank in replicas.ranks]


def write_shards(
    by_position: Iterable[tuple[int, tf.Variable]],
    world: int,
    start: int,
    rows: tf.Tensor,
) -> None:
    """Sets those of some of a table's rows that shards hold.

    Args:
        by_position: shards, by their positions.
        world: the number of all shards.
        start: the first row's index.
        rows: [n, dim] or [n].
    """
    for position, shard in by_position:
        first = (position - start) % world
        if first >= rows.shape[0]:
            continue  # There are fewer rows than shards.
        # A gather takes a sixth of a strided slice's time.
        with tf.device("CPU:0"):
            mine = tf.gather(rows, tf.range(first, rows.shape[0], world))
        row = (start + first) // world
        scatter(shard, tf.range(row, row + mine.shape[0]), mine)
