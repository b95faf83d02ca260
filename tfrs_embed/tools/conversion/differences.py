"""Differences between two checkpoints, read in blocks of rows."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import chain
from tfrs_embed.checkpoint.bundle import blocks
from tfrs_embed.checkpoint.names import SUFFIX
from tfrs_embed.checkpoint.rows import CANDIDATES
from tfrs_embed.tools.conversion.contents import Column, Contents, Table

_Progress = Callable[[int], None]


@dataclasses.dataclass
class ColumnDifference:
    """The difference of parameters, of a slot or of a counter of keys.

    Attributes:
        changed: the number of rows in both that differ; None: the rows have
            other widths, and are not compared.
        mean_distance: the mean Euclidean distance of the rows that differ, of
            those that are finite.
        max_distance: the largest of these distances.
    """

    changed: int | None
    mean_distance: float = 0.0
    max_distance: float = 0.0


@dataclasses.dataclass
class TableDifference:
    """The difference of a table that both checkpoints have.

    Attributes:
        path: the table's path.
        rows: the number of rows that both have, by key or by number.
        only_a: the number of rows that only the first has.
        only_b: the number of rows that only the second has.
        columns: the difference of each column that both have.
        columns_only_a: the names of columns that only the first has.
        columns_only_b: the names of columns that only the second has.
        learning_rates: both rates, if they differ; else None.
    """

    path: str
    rows: int
    only_a: int
    only_b: int
    columns: dict[str, ColumnDifference]
    columns_only_a: list[str]
    columns_only_b: list[str]
    learning_rates: tuple[float | None, float | None] | None


@dataclasses.dataclass
class Difference:
    """The difference of two checkpoints, `a` and `b`.

    Attributes:
        a: the first path.
        b: the second path.
        tables: the difference of each table that both have.
        tables_only_a: the paths of tables that only the first has.
        tables_only_b: the paths of tables that only the second has.
        steps: by layer, both numbers of updates, if they differ.
        others: the names of other variables that differ.
        others_only_a: the names of those that only the first has.
        others_only_b: the names of those that only the second has.
    """

    a: str
    b: str
    tables: list[TableDifference]
    tables_only_a: list[str]
    tables_only_b: list[str]
    steps: dict[str, tuple[int | None, int | None]]
    others: list[str]
    others_only_a: list[str]
    others_only_b: list[str]


def compare(a: Contents, b: Contents, progress: _Progress) -> Difference:
    """Compares two checkpoints.

    Of the keys of a table all are in memory at once, of other values some MiB.
    `progress` is called with numbers of bytes that were read.

    Raises:
        ValueError: a table has keys in one checkpoint only.
        tf.errors.OpError: a file is damaged.
    """
    of_a = {table.path: table for table in a.tables}
    of_b = {table.path: table for table in b.tables}
    others_a = {other.name: other for other in a.others}
    others_b = {other.name: other for other in b.others}
    return Difference(
        a.path,
        b.path,
        [
            _compare_tables(table, of_b[path], progress)
            for path, table in of_a.items()
            if path in of_b
        ],
        *_only(of_a, of_b),
        {
            layer: (a.steps.get(layer), b.steps.get(layer))
            for layer in sorted(a.steps.keys() | b.steps.keys())
            if a.steps.get(layer) != b.steps.get(layer)
        },
        [
            name
            for name, other in others_a.items()
            if name in others_b
            and (other != others_b[name] or not _same_values(name, a, b))
        ],
        *_only(others_a, others_b),
    )


def _only(
    a: Mapping[str, object], b: Mapping[str, object]
) -> tuple[list[str], list[str]]:
    return sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())


def _compare_tables(a: Table, b: Table, progress: _Progress) -> TableDifference:
    if (a.keys is None) != (b.keys is None):
        raise ValueError(
            f"Table '{a.path}' has keys in one of the checkpoints only: its "
            "rows can't be compared."
        )
    if a.keys is None or b.keys is None:
        in_a = in_b = None
        both = min(a.shape[0], b.shape[0])
    else:
        _, in_a, in_b = np.intersect1d(
            _all(a.keys, progress),
            _all(b.keys, progress),
            assume_unique=True,
            return_indices=True,
        )
        order = np.argsort(in_a)
        in_a, in_b, both = in_a[order], in_b[order], len(in_a)
    of_a, of_b = _columns(a), _columns(b)
    rates = a.learning_rate, b.learning_rate
    return TableDifference(
        a.path,
        both,
        a.shape[0] - both,
        b.shape[0] - both,
        {
            name: _compare_columns(
                [(column, in_a), (of_b[name], in_b)], both, progress
            )
            for name, column in of_a.items()
            if name in of_b
        },
        *_only(of_a, of_b),
        rates if rates[0] != rates[1] else None,
    )


def _all(keys: Column, progress: _Progress) -> np.ndarray:
    rows = [rows for _, rows in keys.blocks(progress)]
    return np.concatenate([np.zeros([0], np.int64), *rows])


def _columns(table: Table) -> dict[str, Column]:
    """The columns of a table that have a row for each of its rows."""
    counters = {n: c for n, c in table.counters.items() if n != CANDIDATES}
    return {**table.columns, **counters}


def _compare_columns(
    sides: list[tuple[Column, np.ndarray | None]],
    rows: int,
    progress: _Progress,
) -> ColumnDifference:
    """Compares the rows at the positions of each side; None: the first ones."""
    shape, other = (column.shape for column, _ in sides)
    if shape[1:] != other[1:]:
        return ColumnDifference(None)
    found, finite, total = ColumnDifference(0), 0, 0.0
    for start, size in blocks((rows, *shape[1:]), tf.float32):
        a, b = (
            column.read(start, size)
            if places is None
            else _gather(column, places[start : start + size])
            for column, places in sides
        )
        progress(a.nbytes + b.nbytes)
        a, b = (x.reshape(size, -1) for x in (a, b))
        # NaN equals NaN here.
        differs = ((a != b) & ((a == a) | (b == b))).any(1)
        moved = a[differs].astype(np.float64) - b[differs]
        distances = np.sqrt(np.einsum("ij,ij->i", moved, moved))
        distances = distances[np.isfinite(distances)]
        found.changed = (found.changed or 0) + int(np.count_nonzero(differs))
        finite += len(distances)
        total += float(distances.sum())
        found.max_distance = max(
            found.max_distance, float(distances.max(initial=0))
        )
    found.mean_distance = total / max(1, finite)
    return found


def _gather(column: Column, places: np.ndarray) -> np.ndarray:
    """Returns rows at any places, reading no more than a block at once."""
    order = np.argsort(places)
    # Columns read floats as float32.
    dtype = tf.float32 if column.dtype.is_floating else column.dtype
    shape = (len(places), *column.shape[1:])
    rows = np.empty(shape, dtype.as_numpy_dtype)
    for start, size in blocks(column.shape, tf.float32):
        first, last = np.searchsorted(
            places, [start, start + size], sorter=order
        )
        if first < last:
            here = order[first:last]
            start, end = places[here[0]], places[here[-1]] + 1
            read = column.read(int(start), int(end - start))
            rows[here] = read[places[here] - start]
    return rows


def _same_values(name: str, a: Contents, b: Contents) -> bool:
    """Whether a variable of both has equal values; NaN equals NaN.

    States of iterators are not compared.
    """
    for x, y in zip(_values(name, a), _values(name, b), strict=True):
        same = x == y
        if x.dtype.kind in "fV":
            same |= (x != x) & (y != y)
        if not np.all(same):
            return False
    return True


def _values(name: str, contents: Contents) -> Iterator[np.ndarray]:
    """Reads a variable that belongs to no table, in blocks."""
    prefix = contents.path
    if tf.io.gfile.isdir(prefix):
        prefix = os.path.join(prefix, "variables", "variables")
    if not tf.io.gfile.exists(f"{prefix}.index"):
        return
    reader = chain.read(prefix)
    key = name if name in reader.shapes else name + SUFFIX
    shape, dtype = reader.shapes[key], reader.dtypes[key]
    if dtype == tf.variant:
        return
    if not shape or dtype == tf.string:
        yield np.asarray(reader.read(key).numpy())
        return
    for start, size in blocks(shape, dtype):
        yield reader.read_rows(key, start, size).numpy()
