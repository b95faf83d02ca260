"""Interfaces by which checkpoints read and write tables and slots."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent import futures
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import growth
from tfrs_embed.checkpoint.bundle import (
    BundleReader,
    TensorSlice,
    blocks,
    in_slices,
    wait_for_hosts,
)
from tfrs_embed.checkpoint.names import in_delta, name_in, sibling
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.ops.update import PARAMETERS, scatter_update

if TYPE_CHECKING:
    from tfrs_embed.checkpoint.change_tracking import ChangedRows, TrackedTable

#: The name of a table's keys in a checkpoint.
KEYS = "keys"
#: The names of the counters of keys in a `DynamicKeys` table.
FREQUENCY = "frequency"
#: In the place of frequencies, of a table whose program gives scores.
SCORE = "score"
LAST_USED = "last_used"
#: The same, in microseconds since 1970, of a table that counts in time.
LAST_TIME = "last_used_time"
#: The name of the candidates: keys without rows, and their counters.
CANDIDATES = "candidates"
#: How the names of the rows begin that keys without a row share, and of their
#: slots; "parameters" or a slot's name follow.
FALLBACK = "fallback_"
#: The name of the texts of keys, if a table keeps them.
TEXT = "text"
#: The names of changed rows' numbers, and of removed keys, in a delta.
ROWS = "rows"
REMOVED = "removed"
#: The name of the factors of int8 and int4 rows in an exported model.
SCALE = "scale"

#: The names of parts that are no slots; those of `FALLBACK` begin with it.
PARTS = (
    *(KEYS, FREQUENCY, SCORE, LAST_USED, LAST_TIME, CANDIDATES, TEXT),
    *(ROWS, REMOVED, SCALE, PARAMETERS),
)

#: Numbers of rows: any, [n] int64, or those of a range.
RowNumbers = np.ndarray | range
#: Makes a table's initial rows from a row on, in blocks: (first row, rows).
Initial = Callable[[int], Iterable[tuple[int, tf.Tensor]]]


def other_slot(here: Sequence[int], there: Sequence[int]) -> str:
    """Words for errors about slots whose shapes are of different rules."""
    if {len(here), len(there)} != {1, 2}:
        return ""
    return (
        " One has a number for each row, as with RowWiseAdagrad and "
        "RowWiseAdam. The other has a number for each value, as with other "
        "optimizers. Neither can be made of the other. Restore with the "
        "optimizer it was saved with."
    )


@dataclasses.dataclass(frozen=True, eq=False)
class HeldRows:
    """Rows of a table or slot that this process holds.

    Attributes:
        rows: the number of rows.
        bytes: their memory in bytes.
        gather: returns the rows of the positions [n], without reading others.
        keys: the rows' keys, [rows] int64; None: rows have ids.
    """

    rows: int
    bytes: int
    gather: Callable[[np.ndarray], tf.Tensor]
    keys: np.ndarray | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Save:
    """A save of several values.

    Attributes:
        changed: the tables of which only changed rows are saved, and these.
        in_background: whether training goes on meanwhile.
        shared: what values of a table share, by an object of their own.
    """

    changed: Mapping[TrackedTable, ChangedRows] = dataclasses.field(
        default_factory=dict
    )
    in_background: bool = False
    shared: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def changed_in(self, table: TrackedTable | None) -> ChangedRows | None:
        """Returns a table's changed rows; None: all rows are saved."""
        return None if table is None else self.changed.get(table)


class CheckpointValue(abc.ABC):
    """A value that this library saves and restores, in blocks.

    Attributes:
        name: the value's name in errors.
        order: values of a lower order are restored first.
        optional: whether a checkpoint may lack the value.
        initial: makes the rows that a smaller checkpoint lacks.
        growing: whether the pending restore may grow tables.
        exporting: whether TensorFlow is writing a SavedModel, in which the
            value must be a plain variable.
        table: the table to which the value belongs; None: it belongs to none.
        replicas: the replicas whose workers each write a part; None: this
            process writes the value.
    """

    name: str
    order = 1
    optional = False
    initial: Initial | None = None
    growing = False
    exporting = False
    table: TrackedTable | None = None
    replicas: Replicas | None = None

    def held(self) -> list[HeldRows]:
        """The rows that this process holds as a whole, without a collective."""
        return []

    @property
    def nbytes(self) -> int:
        """Bytes that this process writes to save the value, for progress."""
        return 0

    @abc.abstractmethod
    def slices(self, key: str, save: Save) -> Iterable[TensorSlice]:
        """Returns what this process writes of the value, one after the other.

        Called between steps. In the background, rows may be read then or
        later, and a value that each delta holds as a whole returns nothing.
        """

    @abc.abstractmethod
    def check(self, key: str, reader: BundleReader) -> None:
        """Raises a ValueError if the value under a key doesn't fit.

        Called for all values before the first is restored.
        """

    @abc.abstractmethod
    def restore(self, key: str, reader: BundleReader) -> None:
        """Reads the value under a key."""


class Rows(CheckpointValue):
    """A table or slot: rows [vocabulary_size, dim], or [vocabulary_size].

    Attributes:
        workers: the number of workers among which it is divided.
        is_cut: whether workers have columns of the same rows.
        is_first: whether this worker has the first columns.
        hosts: the CPUs of the hosts that hold it: each reads and writes some
            blocks, so that not all rows pass one of them.
    """

    hosts: Sequence[str] = ("CPU:0",)
    workers = 1
    is_cut = False
    is_first = True
    shape: tf.TensorShape
    dtype: tf.DType = tf.float32

    def read_rows(self, start: int, size: int) -> tf.Tensor:
        """Returns rows [size, dim] or [size], in the host's memory.

        If workers divide the table, all must call with the same numbers.
        """
        return self.collect_rows(range(start, start + size))

    @abc.abstractmethod
    def gather_rows(self, rows: RowNumbers) -> tf.Tensor:
        """Returns rows that this process holds, by their numbers."""

    def collect_rows(self, rows: RowNumbers) -> tf.Tensor:
        """Returns rows that any worker holds, by their numbers.

        If workers divide the table, all must call with the same numbers.
        """
        return self.gather_rows(rows)

    @abc.abstractmethod
    def local(self) -> tuple[Any, Sequence[tf.Variable]]:
        """How the rows are spread, and this process's variables.

        Spread alike, two tables have the same rows in the same places. None:
        the variables can't be written by themselves. All workers know it.
        """

    @abc.abstractmethod
    def write_rows(self, numbers: RowNumbers, rows: tf.Tensor) -> None:
        """Writes rows, [n, dim] or [n], by their unique numbers."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size

    def reading(self) -> contextlib.AbstractContextManager[Any]:
        """A context for reads that belong together."""
        return contextlib.nullcontext()

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """A context for writes that belong together."""
        return contextlib.nullcontext()

    def slices(self, key: str, save: Save) -> Iterator[TensorSlice]:
        changed = save.changed_in(self.table)
        if changed is not None:
            return self.slices_of(key, changed.rows)
        return self._all_slices(key)

    def _all_slices(self, key: str) -> Iterator[TensorSlice]:
        hosts = itertools.cycle(self.hosts)

        def read(start: int, size: int) -> tf.Tensor:
            with tf.device(next(hosts)):
                return self.read_rows(start, size)

        with self.reading():
            yield from in_slices(key, self.shape.as_list(), read)

    def slices_of(
        self,
        key: str,
        rows: np.ndarray,
        start: int = 0,
        total: int | None = None,
    ) -> Iterator[TensorSlice]:
        """Yields changed rows, the ones from `start` on of `total`."""
        yield from row_numbers(key, rows, start, total)
        yield from in_slices(
            in_delta(key),
            [len(rows), *self.shape[1:]],
            lambda first, size: self.gather_rows(rows[first : first + size]),
            start,
            total,
        )

    def write_blocks(self, made: Iterator[tuple[int, tf.Tensor]]) -> None:
        """Writes blocks, (first row, rows), which the hosts make in turns."""
        for host in itertools.cycle(self.hosts):
            with tf.device(host):
                block = next(made, None)
                if block is None:
                    return
                start, rows = block
                self.write_rows(range(start, start + rows.shape[0]), rows)

    def check(self, key: str, reader: BundleReader) -> None:
        there, here = reader.shapes[key], self.shape.as_list()
        where = f"'{self.name}' can't be restored from '{reader.prefix}'"
        if sibling(key, KEYS) in reader.shapes:
            raise ValueError(f"{where}: the checkpoint has a table of keys.")
        if not there or there[1:] != here[1:]:
            raise ValueError(
                f"{where}: it has the shape {here} here and {there} there; "
                f"only the number of rows may differ.{other_slot(here, there)}"
            )
        # Another floating dtype is cast.
        if not reader.dtypes[key].is_floating:
            raise ValueError(
                f"{where}: it is {reader.dtypes[key].name} there, not "
                f"{self.dtype.name}."
            )
        if there[0] > here[0]:
            raise ValueError(
                f"{where}: it has {here[0]} rows here and {there[0]} there; "
                "rows that ids may refer to would be lost."
            )
        may_grow = self.growing or growth.allowed()
        if there[0] < here[0] and (self.initial is None or not may_grow):
            raise ValueError(
                f"{where}: it has {here[0]} rows here and {there[0]} there. To "
                "initialize the others, restore inside of "
                "tfrs_embed.checkpoint.growing_tables()."
            )

    def restore(self, key: str, reader: BundleReader) -> None:
        there = reader.shapes[key]

        def read(block: tuple[int, int], host: str) -> tf.Tensor:
            with tf.device(host):
                return reader.read_rows(key, *block)

        with self.writing(), futures.ThreadPoolExecutor(1) as thread:
            reads = (
                (block[0], host, thread.submit(read, block, host))
                for block, host in zip(
                    blocks(there, tf.float32),
                    itertools.cycle(self.hosts),
                    strict=False,
                )
            )
            end: Any = (there[0], "", None)
            # A block is read while the previous one is written.
            for (start, host, block), _ in itertools.pairwise(
                itertools.chain(reads, [end])
            ):
                with tf.device(host):
                    rows = tf.cast(block.result(), self.dtype)
                    numbers = range(start, start + rows.shape[0])
                    self.write_rows(numbers, rows)
            if len(self.hosts) > 1:
                wait_for_hosts()
            if there[0] < self.shape[0]:
                assert self.initial is not None
                self.write_blocks(
                    (start, tf.cast(rows, self.dtype))
                    for start, rows in self.initial(there[0])
                )


def row_numbers(
    key: str, rows: np.ndarray, start: int = 0, total: int | None = None
) -> Iterator[TensorSlice]:
    """Yields the numbers of changed rows, if `key` is of the parameters."""
    if name_in(key) == PARAMETERS:
        yield from in_slices(
            in_delta(key, ROWS),
            rows.shape,
            lambda first, size: rows[first : first + size],
            start,
            total,
        )


class VariableRows(Rows):
    """The rows of a variable that holds a whole table, or of its copies."""

    def __init__(self, name: str, variable: tf.Variable) -> None:
        self.name = name
        self.shape = variable.shape
        self.dtype = variable.dtype
        self._copies: Sequence[tf.Variable] = getattr(
            variable, "values", [variable]
        )

    def held(self) -> list[HeldRows]:
        return [HeldRows(self.shape[0], self.nbytes, self.gather_rows)]

    def local(self) -> tuple[Any, Sequence[tf.Variable]]:
        return ("copies", len(self._copies)), self._copies

    def gather_rows(self, rows: RowNumbers) -> tf.Tensor:
        return read_variable(self._copies[0], rows)

    def write_rows(self, numbers: RowNumbers, rows: tf.Tensor) -> None:
        for copy in self._copies:
            scatter(copy, to_tensor(numbers, tf.int64), rows)


def read_variable(variable: tf.Variable, rows: RowNumbers) -> tf.Tensor:
    """Returns rows of a variable in the host's memory, reading no others."""
    # `variable[...]` copies a variable that was updated sparsely.
    with tf.device(variable.device):
        found = tf.gather(variable, to_tensor(rows, tf.int64))
    with tf.device("CPU:0"):
        return tf.identity(found)


def to_tensor(rows: RowNumbers, dtype: tf.DType) -> tf.Tensor:
    """Returns numbers of rows as a tensor, a range's without a constant."""
    if isinstance(rows, range):
        return tf.range(rows.start, rows.stop, rows.step, dtype)
    return tf.constant(rows, dtype)


def scatter(variable: tf.Variable, ids: tf.Tensor, rows: tf.Tensor) -> None:
    """Writes rows of unique `ids` in place, on the variable's device."""
    with tf.device(variable.device):
        scatter_update(variable, ids, rows)


def run_in_place(function: Callable[[], None]) -> None:
    """Calls a function now, or through `tf.py_function` while tracing."""
    if tf.executing_eagerly():
        function()
    else:
        tf.py_function(function, [], [])
