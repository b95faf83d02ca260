"""The tables of a checkpoint, whichever library wrote it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import blocks
from tfrs_embed.checkpoint.rows import CANDIDATES, FALLBACK, KEYS
from tfrs_embed.ops.update import PARAMETERS

#: What a checkpoint lacks in which no library's tables are found.
NO_TABLES = (
    "has no tables of this package, of TensorFlow's TPU embeddings, of "
    "keras_rs, of Keras, or of SOK."
)


@dataclasses.dataclass(frozen=True)
class Column:
    """The values of one variable, read in blocks of rows.

    Attributes:
        shape: [rows, dim]; [rows]; or [] for a number.
        read: returns rows, given the first row's index and the number of rows:
            float32 for floating dtypes, else the variable's dtype.
        dtype: the dtype that a converted checkpoint has.
        name: the variable's name in its file.
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], np.ndarray]
    dtype: tf.DType = tf.float32
    name: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        if (
            self.dtype == tf.dtypes.experimental.int4
        ):  # Two numbers of a row are a byte.
            return self.shape[0] * ((self.shape[1] + 1) // 2)
        return self.dtype.size * math.prod(self.shape)

    def blocks(
        self, progress: Callable[[int], None]
    ) -> Iterator[tuple[int, np.ndarray]]:
        """Reads all rows in blocks; yields the first row and the rows of each.

        `progress` is called with numbers of bytes that were read.
        """
        for start, size in blocks(self.shape, tf.float32):
            rows = self.read(start, size)
            progress(self.dtype.size * rows.size)
            yield start, rows

    @property
    def is_table(self) -> bool:
        """Whether the values may be a table's: [rows, dim] of floats."""
        shape = self.shape
        return len(shape) == 2 and shape[1] > 0 and self.dtype.is_floating

    def as_dtype(self, dtype: tf.DType) -> Column:
        """The same values, converted to another dtype."""
        return dataclasses.replace(self, dtype=dtype)

    def number(self) -> int | float:
        """The value of a variable of shape [].

        Raises a ValueError if it has another shape.
        """
        if math.prod(self.shape) != 1:
            raise ValueError(
                f"'{self.name}' must be a number, but has the shape "
                f"{list(self.shape)}."
            )
        return self.read(0, 1).item()


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        layer: the path of its layer among the saved objects.
        name: its name; "" for the only table of an All2AllDenseEmbedding.
        columns: parameters and slots by name. Their shape is [rows, dim]; a
            slot with one number for each row has [rows].
        parts: int64 columns of a table of keys by name: the rows' keys, their
            frequency and last use, [rows], and candidates, [c, 3]; and scores,
            [rows] float32, in the place of frequencies. Without keys, ids are
            the rows' numbers.
        learning_rate: the optimizer's rate; None: unknown.
        of_keras: whether it is the variable of a Keras Embedding layer. Such a
            variable is saved as "<layer>/embeddings".
    """

    layer: str
    name: str
    columns: Mapping[str, Column]
    parts: Mapping[str, Column] = dataclasses.field(default_factory=dict)
    learning_rate: float | None = None
    of_keras: bool = False

    @property
    def path(self) -> str:
        """The table's path among the saved objects, for messages."""
        return "/".join(part for part in (self.layer, self.name) if part)

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, dim]."""
        rows, dim = next(iter(self.columns.values())).shape
        return rows, dim

    @property
    def all_columns(self) -> dict[str, Column]:
        """`columns` and `parts`."""
        return {**self.columns, **self.parts}

    @property
    def keys(self) -> Column | None:
        """The rows' keys, or None."""
        return self.parts.get(KEYS)

    @property
    def counters(self) -> dict[str, Column]:
        """`parts` without the keys."""
        return {name: part for name, part in self.parts.items() if name != KEYS}

    def check_shapes(self) -> None:
        """Raises a ValueError if the columns don't fit together."""
        if PARAMETERS not in self.columns:
            raise ValueError(f"Table '{self.path}' has no parameters.")
        shape = self.columns[PARAMETERS].shape
        for name, column in self.columns.items():
            if column.shape not in (shape, shape[:1]):
                raise ValueError(
                    f"Table '{self.path}' has parameters of shape "
                    f"{list(shape)}, but {name} of shape {list(column.shape)}."
                )
        for name, column in self.parts.items():
            if name.startswith(FALLBACK):
                continue  # Rows of their own: a restore checks these.
            expected = (column.shape[0], 3) if name == CANDIDATES else shape[:1]
            if column.shape != expected:
                raise ValueError(
                    f"Table '{self.path}' has {shape[0]} rows, but {name} of "
                    f"shape {list(column.shape)}."
                )


@dataclasses.dataclass(frozen=True)
class PlainVariable:
    """A variable that belongs to no table; strings have 0 bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclasses.dataclass
class Contents:
    """The contents of a checkpoint, which each library's `find` adds to.

    Attributes:
        path: the checkpoint's path.
        format: the libraries that wrote it, in words.
        tables: the tables.
        steps: the number of updates by the layer's path, where it is known.
        others: variables that belong to no table.
        notes: sentences for the reader.
        taken: the names of the tables' variables.
    """

    path: str
    format: str = "no tables"
    tables: list[Table] = dataclasses.field(default_factory=list)
    steps: dict[str, int] = dataclasses.field(default_factory=dict)
    others: list[PlainVariable] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    taken: set[str] = dataclasses.field(default_factory=set)

    def add(self, table: Table) -> None:
        """Adds a table, and takes its variables."""
        self.tables.append(table)
        self.taken |= {column.name for column in table.all_columns.values()}
