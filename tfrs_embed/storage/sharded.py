"""A table whose rows or columns are spread over several variables."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import TensorSlice, blocks, cpu_of_host
from tfrs_embed.checkpoint.names import in_delta
from tfrs_embed.checkpoint.rows import (
    HeldRows,
    RowNumbers,
    Rows,
    Save,
    read_variable,
    row_numbers,
    scatter,
    to_tensor,
)
from tfrs_embed.checkpoint.value_copies import copy_for_saving
from tfrs_embed.compat.graphs import TracedOnce
from tfrs_embed.compat.strategies import NoValuesError, is_offline
from tfrs_embed.distribution import long_waits
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.ops.bags import concat
from tfrs_embed.storage.composite import CompositeVariable
from tfrs_embed.storage.gathering import Gathering

#: Workers exchange rows in blocks of this many numbers to save a table.
BLOCK_ELEMENTS = 1 << 22


class Part(NamedTuple):
    """The rows and columns of a table that a variable holds.

    Attributes:
        rows: the table's rows, in the variable's order.
        columns: the first column, and the one after the last; None: all
            columns, or the rows have none.
        offset: the variable's row that holds the first of `rows`.
    """

    rows: range
    columns: tuple[int, int] | None = None
    offset: int = 0

    def find(self, rows: RowNumbers) -> tuple[RowNumbers, RowNumbers]:
        """Finds rows by their numbers: places in `rows`, and in the variable.

        It leaves out rows that the variable doesn't hold. For a range, whose
        step is 1, it returns ranges.
        """
        if isinstance(rows, range):
            first, end = self.within(rows.start, len(rows))
            if first >= end:
                return range(0), range(0)
            mine, start = self.rows[first:end], rows.start
            places = range(mine.start - start, mine.stop - start, mine.step)
            return places, range(self.offset + first, self.offset + end)
        row, here = self.locate(rows)
        return np.flatnonzero(here), row[here]

    def locate(self, rows: Any) -> tuple[Any, Any]:
        """Returns places of rows in the variable, and whether it holds each.

        `rows` are numbers of rows, [n], in an array or a tensor of int64.
        """
        row = (rows - self.rows.start) // self.rows.step
        here = (row >= 0) & (row < len(self.rows))
        here &= self.rows.start + row * self.rows.step == rows
        return self.offset + row, here

    def within(self, start: int, size: int) -> tuple[int, int]:
        """Returns which of `rows` are in [start, start + size): first, end."""
        before = start - self.rows.start
        first = -(-before // self.rows.step)
        end = -(-(before + size) // self.rows.step)
        return max(0, first), min(len(self.rows), end)

    def write(
        self, variable: tf.Variable, numbers: RowNumbers, rows: tf.Tensor
    ) -> None:
        """Writes the table's rows, [n, dim] or [n], that the variable holds.

        `numbers` are the rows' in the table. `rows` have all columns; the
        variable's columns beyond the table's are set to zero.
        """
        places, held = self.find(numbers)
        if not len(held):
            return
        with tf.device("CPU:0"):
            if len(places) < len(numbers):
                # A gather takes a sixth of a strided slice's time.
                rows = tf.gather(rows, to_tensor(places, tf.int64))
            if self.columns is not None:
                rows = rows[:, slice(*self.columns)]
            if variable.shape[1:] != rows.shape[1:]:
                padding = variable.shape[1] - rows.shape[1]
                rows = tf.pad(rows, [[0, 0], [0, padding]])
        scatter(variable, to_tensor(held, tf.int64), rows)


class ShardedVariable(CompositeVariable, Rows):
    """A table, or a slot, in parts: rows, columns, or copies.

    If several workers share the table, reading it gathers the rows of all, and
    saving it has each worker write a part. All workers must then read and save
    together, as they save Keras's variables.

    Args:
        name: "<table>/parameters" or "<table>/<slot>".
        shape: [vocabulary_size, dim]; [vocabulary_size] for a slot by row.
        held: this process's parts and their variables, by the replicas' ranks.
        strategy: the strategy under which it was made.
        dtype: the dtype of its numbers.
        replicas: the replicas that share the table; None: this process has all.
        parts: the parts by these replicas' ranks. All parts have equally many
            columns, and either all rows or every n-th row of n replicas.
        copied: whether each variable holds the whole table. The first is read,
            and SavedModels hold it.
        on_write: called after a block was written: f(rows' numbers, rows).
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        held: Sequence[tuple[Part, tf.Variable]],
        strategy: tf.distribute.Strategy,
        dtype: tf.DType = tf.float32,
        *,
        replicas: Replicas | None = None,
        parts: Mapping[int, Part] | None = None,
        copied: bool = False,
        on_write: Callable[[RowNumbers, tf.Tensor], None] | None = None,
    ) -> None:
        super().__init__([v for _, v in held], strategy)
        self.dtype = dtype
        self.name = f"{name}:0"
        self.shape = tf.TensorShape(shape)
        self._has_values = not is_offline(strategy)
        hosts = {cpu_of_host(v.device) for v in self._variables}
        if len(hosts) > 1 and self._has_values:
            self.hosts = sorted(hosts)
        self._parts = [part for part, _ in held]
        # The parts to read here, with each row and column once.
        self._sources = list(held[:1] if copied else held)
        self.replicas = replicas
        self._by_rank = dict(parts or {})
        self._copied = copied
        if copied:
            self._exported = self._variables[:1]
        self._on_write = on_write
        self.workers = 1 if replicas is None else replicas.workers
        if replicas is None or self.workers == 1:
            return
        part = next(iter(self._by_rank.values()))
        self.is_cut = part.columns is not None and len(self._by_rank) > 1
        first = min(
            self._by_rank, key=lambda r: (self._by_rank[r].columns or (0,), r)
        )
        self.is_first = first in replicas.ranks
        self._row = tuple(shape[1:])
        if part.columns is not None:
            self._row = (part.columns[1] - part.columns[0],)
        # The number of rows of each part that workers exchange at a time.
        self._rows_of_part = max(len(p.rows) for p in self._by_rank.values())
        self._block = min(
            self._rows_of_part,
            max(1, BLOCK_ELEMENTS // math.prod(self._row) // replicas.world),
        )
        self._channel = replicas.allocate(1)
        self._collect = Gathering(replicas, f"read '{self._shared_name}'")
        self._swap = TracedOnce(self._swap_block, tf.TensorSpec([], tf.int32))

    @property
    def nbytes(self) -> int:
        """The bytes that this worker writes: about its share of the table."""
        return super().nbytes // self.workers

    def numpy(self) -> np.ndarray:
        """Returns the whole table or slot."""
        whole = np.empty(self.shape.as_list(), self.dtype.as_numpy_dtype)
        with self.reading():
            for start, size in blocks(whole.shape, self.dtype):
                rows = self.read_rows(start, size)
                whole[start : start + size] = rows.numpy()
        return whole

    def _read_in_graph(self) -> tf.Tensor:
        return tf.ensure_shape(self.read_rows(0, self.shape[0]), self.shape)

    def assign(self, value: Any) -> None:
        """Sets the whole table; of the same value each worker keeps its rows.

        Raises:
            ValueError: the value has another shape.
        """
        with tf.device("CPU:0"):
            value = tf.cast(tf.convert_to_tensor(value), self.dtype)
        if value.shape != self.shape:
            raise ValueError(
                f"'{self.name}' has the shape {tuple(self.shape)}, and can't "
                f"be given a value of shape {tuple(value.shape)}."
            )
        with self.writing():
            self.write_rows(range(self.shape[0]), value)
        if self.table is not None:
            self.table.assigned()

    def held(self) -> list[HeldRows]:
        """Returns this process's rows; none if it lacks columns of its rows."""
        _require_values(self)
        size = math.prod(self.shape[1:]) * self.dtype.size
        groups = [self._sources]  # Each has columns of the same rows.
        if all(part.columns is None for part, _ in self._sources):
            groups = [[source] for source in self._sources]
        elif len(self._sources) != len(self._by_rank):
            return []

        def gather(
            parts: Sequence[tuple[Part, tf.Variable]], wanted: np.ndarray
        ) -> tf.Tensor:
            columns = [
                _read(variable, part.offset + wanted, self.shape)
                for part, variable in parts
            ]
            with tf.device("CPU:0"):
                return concat(columns, 1)

        counts = [len(parts[0][0].rows) for parts in groups]
        return [
            HeldRows(n, n * size, functools.partial(gather, parts))
            for n, parts in zip(counts, groups, strict=True)
        ]

    def gather_rows(self, rows: RowNumbers) -> tf.Tensor:
        found = [
            (part, _read(variable, part.find(rows)[1], self.shape))
            for part, variable in self._sources
        ]
        return _joined(rows, found)

    def collect_rows(self, rows: RowNumbers) -> tf.Tensor:
        _require_values(self)
        if self.replicas is None or self.workers == 1:
            return self.gather_rows(rows)
        parts, variables = self._by_rank, iter(self._variables)
        none = np.zeros([0, *self._row], self.dtype.as_numpy_dtype)
        by_rank = self._collect(
            [
                _read(
                    next(variables), parts[rank].find(rows)[1], self.shape
                ).numpy()
                if rank in parts
                else none
                for rank in self.replicas.ranks
            ]
        )
        return _joined(
            rows, [(p, by_rank[rank]) for rank, p in self._by_rank.items()]
        )

    def local(self) -> tuple[Any, Sequence[tf.Variable]]:
        parts = tuple(self._by_rank.items())
        spread = (self._copied, parts) if parts and not self._on_write else None
        return spread, self._variables

    def write_rows(self, numbers: RowNumbers, rows: tf.Tensor) -> None:
        """Sets rows, [n, dim] or [n]; keeps those that this process has."""
        for part, variable in zip(self._parts, self._variables, strict=True):
            part.write(variable, numbers, rows)
        if self._on_write is not None:
            self._on_write(numbers, rows)

    def slices(self, key: str, save: Save) -> Iterator[TensorSlice]:
        if self.workers == 1:
            return super().slices(key, save)
        changed = save.changed_in(self.table)
        if changed is None:
            return self._slices_of_worker(key)
        return self._changed_of_worker(key, changed.rows, save)

    def _slices_of_worker(self, key: str) -> Iterator[TensorSlice]:
        assert self.replicas is not None
        shape, world = self.shape.as_list(), self.replicas.world
        if any(part.rows.step > 1 for part in self._parts):
            # A checkpoint has rows in table order: each worker writes every
            # world-th block, with rows from all workers.
            step = self._block * world
            for start in range(0, self._rows_of_part, step):
                action = f"save '{self._shared_name}'"
                with long_waits.together(self.replicas, action):
                    swapped = self._swap(tf.constant(start))
                ranks = self.replicas.ranks
                for rank, rows in zip(ranks, swapped, strict=True):
                    row = (start + rank * self._block) * world
                    size = min(step, shape[0] - row)
                    if size > 0:
                        with tf.device("CPU:0"):
                            rows = tf.identity(rows[:size])
                        yield TensorSlice(key, rows, shape, row)
            return
        for part, variable in zip(self._parts, self._variables, strict=True):
            column = part.columns[0] if part.columns else None
            for start, size in blocks(variable.shape, self.dtype):
                rows = read_variable(variable, range(start, start + size))
                yield TensorSlice(key, rows, shape, start, column)

    def _changed_of_worker(
        self, key: str, rows: np.ndarray, save: Save
    ) -> Iterator[TensorSlice]:
        replicas = self.replicas
        assert replicas is not None
        if any(len(p.rows) < self.shape[0] for p in self._by_rank.values()):
            if self.table not in save.shared:
                here = [len(rows)] + [0] * (replicas.local - 1)
                save.shared[self.table] = self._collect.numbers(here)
            counts = save.shared[self.table]
            start, total = sum(counts[: replicas.ranks[0]]), sum(counts)
            if total or replicas.worker == 0:
                yield from self.slices_of(key, rows, start, total)
            return
        # The workers have columns of the same rows, or copies of a slot.
        parts = list(zip(self._parts, self._variables, strict=True))
        if self.is_first and (not len(rows) or self._parts[0].columns is None):
            yield from self.slices_of(key, rows)
            return
        if self.is_first:
            yield from row_numbers(key, rows)
        shape = [len(rows), *self.shape[1:]]
        for part, variable in parts:
            if part.columns is None:
                continue  # The first worker has written its copy.
            for at, size in blocks(shape, self.dtype):
                held = part.find(rows[at : at + size])[1]
                values = _read(variable, held, self.shape)
                yield TensorSlice(
                    in_delta(key), values, shape, at, part.columns[0]
                )

    def _swap_block(self, start: tf.Tensor) -> list[tf.Tensor]:
        """Exchanges rows so that local replicas get blocks in table order.

        Local replica of rank r gets the rows that all shards have at [start + r
        * block, start + (r + 1) * block).
        """
        replicas, parts = self.replicas, self._by_rank
        assert replicas is not None
        # The ranks, sorted by their first rows.
        order = sorted(parts, key=lambda rank: parts[rank].rows.start)
        swapped = []
        for i, shard in enumerate(self._variables):
            # The receiver cuts off rows beyond the last.
            rows = start + tf.range(replicas.world * self._block)
            rows = tf.minimum(rows, shard.shape[0] - 1)
            shape = [replicas.world, -1, *self._row]
            mine = tf.reshape(tf.gather(shard, rows), shape)
            got = replicas.all_to_all(i, mine, self._channel)
            axes = [1, 0, *range(2, len(shape))]
            got = tf.transpose(tf.gather(got, order), axes)
            swapped.append(tf.reshape(got, [-1, *self._row]))
        return swapped

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        if self.workers > 1:
            raise RuntimeError(
                f"'{self.name}' is sharded over {self.workers} workers, whose "
                "parts of a checkpoint are exchanged between steps: save "
                "without experimental_enable_async_checkpoint."
            )
        copy_for_saving(self, object_map)


def _require_values(variable: ShardedVariable) -> None:
    """Raises NoValuesError where the strategy's TPUs are not connected."""
    if not variable._has_values:
        raise NoValuesError(
            f"'{variable._shared_name}' has no values: programs for its TPUs "
            "are checked, but no TPU is connected."
        )


def _read(
    variable: tf.Variable, rows: RowNumbers, shape: tf.TensorShape
) -> tf.Tensor:
    """Returns rows of a part, by their numbers there, in the host's memory.

    Columns beyond those of the table's `shape` are left out.
    """
    found = read_variable(variable, rows)
    if found.shape[1:] == shape[1:] or found.shape.rank == 1:
        return found
    with tf.device("CPU:0"):
        return found[:, : shape[1]]


def _joined(rows: RowNumbers, found: Sequence[tuple[Part, Any]]) -> tf.Tensor:
    """Returns rows by their numbers, of all parts and what each has of them."""
    columns: dict[Any, list[tuple[tf.Tensor, tf.Tensor]]] = {}
    with tf.device("CPU:0"):
        for part, values in found:
            places = to_tensor(part.find(rows)[0], tf.int32)
            each = places, tf.convert_to_tensor(values)
            columns.setdefault(part.columns, []).append(each)
        joined = [
            tf.dynamic_stitch(*zip(*parts, strict=True))
            if len(parts) > 1
            else parts[0][1]  # It has all rows, in order.
            for parts in columns.values()
        ]
        return concat(joined, 1)
