"""The contents of a checkpoint, whoever wrote it: tables as rows by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.rows import CANDIDATES, KEYS


@dataclasses.dataclass(frozen=True)
class Column:
    """A table's parameters, a slot, its keys or their counters.

    Attributes:
        shape: [rows, dim], or [rows] if there is a number for each row.
        read: returns rows, given the first one's index and how many: float32,
            or int64 of keys and counters.
        dtype: what these are of, and what a checkpoint of this package has: of
            this package's own tables the one in the checkpoint.
    """

    shape: tuple[int, ...]
    read: Callable[[int, int], np.ndarray]
    dtype: tf.DType = tf.float32

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""
        return self.nbytes_of(self.shape[0])

    def nbytes_of(self, rows: int) -> int:
        """Bytes of some of its rows."""
        return self.dtype.size * rows * math.prod(self.shape[1:])


@dataclasses.dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        layer: the path of its layer among the saved objects.
        name: its name; "" for that of a layer that has only one.
        columns: parameters and slots by name, of equal shapes, but for slots
            that have a number for each row.
        keys: the rows' keys, [rows] int64; None: the rows' numbers are ids.
        counters: of keys that come and go the frequency and the last use,
            [rows] int64, and the candidates, [c, 3] int64, by name.
        learning_rate: that of its optimizer; None: it is not known.
        of_keras: whether it is the variable of a Keras Embedding layer, which
            is saved as "<layer>/embeddings", and its slots elsewhere.
    """

    layer: str
    name: str
    columns: Mapping[str, Column]
    keys: Column | None = None
    counters: Mapping[str, Column] = dataclasses.field(default_factory=dict)
    learning_rate: float | None = None
    of_keras: bool = False

    @property
    def path(self) -> str:
        """Its place among the saved objects, for messages."""
        return "/".join(part for part in (self.layer, self.name) if part)

    @property
    def shape(self) -> tuple[int, int]:
        """[rows, dim]."""
        rows, dim = next(iter(self.columns.values())).shape
        return rows, dim

    @property
    def parts(self) -> dict[str, Column]:
        """The keys and their counters by name; empty if it has ids."""
        keys = {} if self.keys is None else {KEYS: self.keys}
        return {**keys, **self.counters}


@dataclasses.dataclass(frozen=True)
class Other:
    """A variable that belongs to no table.

    Attributes:
        name: its key.
        shape: its shape.
        dtype: its dtype's name.
        nbytes: bytes of its values; 0 for strings.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
        path: where it is.
        format: who writes such checkpoints, in words.
        tables: the tables.
        steps: the number of updates by the layer's path, where it is known.
        others: variables that belong to no table.
        notes: what a reader of this should know, a sentence each.
    """

    path: str
    format: str
    tables: tuple[Table, ...]
    steps: Mapping[str, int]
    others: tuple[Other, ...]
    notes: tuple[str, ...] = ()


def check_shapes(table: Table) -> None:
    """Checks that a table's columns go together.

    Args:
        table: the table.

    Raises:
        ValueError: it has no parameters, or a slot, the keys or a counter has
            another shape.
    """
    if "parameters" not in table.columns:
        raise ValueError(f"Table '{table.path}' has no parameters.")
    shape = table.columns["parameters"].shape
    for name, column in table.columns.items():
        if column.shape not in (shape, shape[:1]):
            raise ValueError(
                f"Table '{table.path}' has parameters of shape {list(shape)}, "
                f"but {name} of shape {list(column.shape)}."
            )
    for name, column in table.parts.items():
        expected = (column.shape[0], 3) if name == CANDIDATES else shape[:1]
        if column.shape != expected:
            raise ValueError(
                f"Table '{table.path}' has {shape[0]} rows, but {name} of "
                f"shape {list(column.shape)}."
            )
