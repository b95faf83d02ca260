"""The interface of a table to checkpoints, which read and write its rows."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent import futures
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import growth
from tfrs_embed.checkpoint.bundle import BundleReader, blocks
from tfrs_embed.checkpoint.session import Session
from tfrs_embed.ops.update import scatter_update

#: The name of a variable's value in a checkpoint.
VALUE = "VARIABLE_VALUE"
_SUFFIX = f"/.ATTRIBUTES/{VALUE}"
#: The name of a table's keys in a checkpoint.
KEYS = "keys"
#: The names of the keys' counters, where keys come and go.
FREQUENCY = "frequency"
LAST_USED = "last_used"
#: The name of what is known of keys without rows.
CANDIDATES = "candidates"
#: The name of the factors of int8 rows in an exported model.
SCALE = "scale"

#: Makes initial rows from a row on: (first row's index, rows) block by block.
Initial = Callable[[int], Iterable[tuple[int, tf.Tensor]]]


def key_of(name: str) -> str:
    """The key of an object's value, of the object's name or the key itself."""
    return name if name.endswith(_SUFFIX) else f"{name}{_SUFFIX}"


def other_slot(here: Sequence[int], there: Sequence[int]) -> str:
    """Says that two slots of one name are of different rules, if they are."""
    if {len(here), len(there)} != {1, 2}:
        return ""
    return (
        " One has a number for each row, as RowWiseAdagrad keeps it, the other "
        "one for each of a row's columns, as other optimizers do: neither can "
        "be made of the other. Restore with the optimizer it was saved with."
    )


def sibling(key: str, name: str) -> str:
    """The key of another object, which has the same parent."""
    parent, slash, _ = key[: -len(_SUFFIX)].rpartition("/")
    return f"{parent}{slash}{name}{_SUFFIX}"


@dataclasses.dataclass(frozen=True, eq=False)
class HeldRows:
    """Rows of a table, or of a slot, that this process holds.

    Attributes:
        rows: their number.
        bytes: the memory that they take.
        gather: takes numbers below `rows`, [n], and returns these rows, without
            reading others.
        keys: of a table of keys the key of each row, [rows] int64.
    """

    rows: int
    bytes: int
    gather: Callable[[np.ndarray], tf.Tensor]
    keys: np.ndarray | None = None


class Saved(abc.ABC):
    """A value that is saved and restored in blocks.

    Attributes:
        order: values of a lower order are restored first.
        optional: whether there are checkpoints without it.
        initial: makes the rows that a smaller table doesn't have.
        growing: whether the restore that was last announced may grow tables.
        exporting: whether it was last asked for by a SavedModel, which holds
            variables alone.
    """

    name: str
    order = 1
    optional = False
    initial: Initial | None = None
    growing = False
    exporting = False

    def held(self) -> list[HeldRows]:
        """The rows that this process holds, each once; no collective.

        Empty if it is no rows, or if this process has none as a whole.
        """
        return []

    @property
    def nbytes(self) -> int:
        """How much this process writes to save it; 0 if it hardly matters."""
        return 0

    @abc.abstractmethod
    def save(self, key: str, session: Session) -> None:
        """Writes it under a key."""

    @abc.abstractmethod
    def check(self, key: str, reader: BundleReader) -> None:
        """Checks that what is under a key fits, before anything is restored.

        Raises:
            ValueError: it does not.
        """

    @abc.abstractmethod
    def restore(self, key: str, reader: BundleReader) -> None:
        """Reads what is under a key."""


class Rows(Saved):
    """A table, or a slot, as rows: [vocabulary_size, dim] of `dtype`.

    A slot may have one number for each row, [vocabulary_size]: each is then a
    row here.
    """

    shape: tf.TensorShape
    dtype: tf.DType = tf.float32

    @abc.abstractmethod
    def read_rows(self, start: int, size: int) -> tf.Tensor:
        """Returns rows, [size, dim] or [size], in the host's memory."""

    @abc.abstractmethod
    def write_rows(self, start: int, rows: tf.Tensor) -> None:
        """Sets the rows from `start` on to a block, [n, dim] or [n]."""

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.size

    def reading(self) -> contextlib.AbstractContextManager[Any]:
        """Surrounds reads that belong together."""
        return contextlib.nullcontext()

    def writing(self) -> contextlib.AbstractContextManager[Any]:
        """Surrounds writes that belong together."""
        return contextlib.nullcontext()

    def save(self, key: str, session: Session) -> None:
        writer, shape = session.writer(), self.shape.as_list()
        with self.reading():
            for start, size in blocks(shape, tf.float32):
                rows = self.read_rows(start, size)
                writer.add_rows(key, shape, start, rows)

    def check(self, key: str, reader: BundleReader) -> None:
        there, here = reader.shapes[key], self.shape.as_list()
        where = f"'{self.name}' can't be restored from '{reader.prefix}'"
        if sibling(key, KEYS) in reader.shapes:
            raise ValueError(f"{where}: there it is a table of keys.")
        if not there or there[1:] != here[1:]:
            raise ValueError(
                f"{where}: it has the shape {here} here and {there} there; "
                f"only the number of rows may differ.{other_slot(here, there)}"
            )
        # Keras's part of a layer may be of another than engines have.
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
        with self.writing(), futures.ThreadPoolExecutor(1) as thread:
            reads = (
                (start, thread.submit(reader.read_rows, key, start, size))
                for start, size in blocks(there, tf.float32)
            )
            end: Any = (there[0], None)
            # One block is read while the one before is written.
            for (start, read), _ in itertools.pairwise(
                itertools.chain(reads, [end])
            ):
                self.write_rows(start, tf.cast(read.result(), self.dtype))
            if there[0] < self.shape[0]:
                assert self.initial is not None
                for start, rows in self.initial(there[0]):
                    self.write_rows(start, tf.cast(rows, self.dtype))


class VariableRows(Rows):
    """The rows of a variable that holds its table whole.

    Args:
        name: what errors call it.
        variable: the variable, of one device or of a strategy that gives each
            replica a copy.
    """

    def __init__(self, name: str, variable: tf.Variable) -> None:
        self.name = name
        self.shape = variable.shape
        self.dtype = variable.dtype
        self._copies: Sequence[tf.Variable] = getattr(
            variable, "values", [variable]
        )

    def held(self) -> list[HeldRows]:
        variable, rows = self._copies[0], self.shape[0]

        def gather(wanted: np.ndarray) -> tf.Tensor:
            # Reading the variable would copy it if it was updated sparsely.
            with tf.device(variable.device):
                return tf.gather(variable, tf.constant(wanted, tf.int64))

        return [HeldRows(rows, self.nbytes, gather)]

    def read_rows(self, start: int, size: int) -> tf.Tensor:
        return read_variable(self._copies[0], start, size)

    def write_rows(self, start: int, rows: tf.Tensor) -> None:
        for copy in self._copies:
            scatter(copy, tf.range(start, start + rows.shape[0]), rows)


def read_variable(variable: tf.Variable, start: int, size: int) -> tf.Tensor:
    """Returns rows of a variable in the host's memory; it reads no others."""
    # Reading the variable would copy all of it if it was updated sparsely.
    with tf.device(variable.device):
        rows = tf.gather(variable, tf.range(start, start + size))
    with tf.device("CPU:0"):
        return tf.identity(rows)


def scatter(variable: tf.Variable, ids: tf.Tensor, rows: tf.Tensor) -> None:
    """Writes rows in place, on the variable's device.

    Args:
        variable: [n, dim] or [n].
        ids: the rows' indices, unique.
        rows: the rows.
    """
    with tf.device(variable.device):
        scatter_update(variable, ids, rows)


def run_in_place(function: Callable[[], None]) -> None:
    """Calls a function now, or through `tf.py_function` while tracing."""
    if tf.executing_eagerly():
        function()
    else:
        tf.py_function(function, [], [])
