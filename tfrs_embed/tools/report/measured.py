"""Tables of a checkpoint or of an exported model, measured block by block."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable

import numpy as np

from tfrs_embed.checkpoint.rows import SCALE
from tfrs_embed.compat import progress
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion.contents import Column, Contents, Table
from tfrs_embed.tools.conversion.statistics import Statistics, measure

#: Norms of rows are counted in steps of an eighth of an octave.
STEPS_PER_OCTAVE = 8
_OCTAVES = 64
_LOWEST = -_OCTAVES // 2
_STEPS = STEPS_PER_OCTAVE * _OCTAVES
#: The upper end of each step.
UPPER_NORMS = 2.0 ** (_LOWEST + (np.arange(_STEPS) + 1.0) / STEPS_PER_OCTAVE)


@dataclasses.dataclass(frozen=True)
class MeasuredTable:
    """A table with what its values are like.

    Attributes:
        table: the table.
        statistics: those of its parameters.
        norms: [steps], rows whose norm is finite, above zero and within a step
            of `UPPER_NORMS`; those beyond are in the first and the last.
        untouched: rows whose slots are as they were before the first update;
            None: there are no slots to tell.
    """

    table: Table
    statistics: Statistics
    norms: np.ndarray
    untouched: int | None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return self.table.shape[0]

    @property
    def row_bytes(self) -> int:
        """Bytes of the parameters."""
        return self.table.columns[PARAMETERS].nbytes

    @property
    def bytes(self) -> int:
        """Bytes of the parameters and slots."""
        return sum(column.nbytes for column in self.table.columns.values())


def measure_tables(contents: Contents) -> list[MeasuredTable]:
    """Reads all tables, a block at a time.

    Args:
        contents: those of a checkpoint, or of an exported model, whose tables
            have no slots.

    Returns:
        The tables, the largest first.
    """
    total = sum(c.nbytes for t in contents.tables for c in t.columns.values())
    name = os.path.basename(contents.path.rstrip("/"))
    with progress.Task("Reading", f"'{name}'", total) as task:
        found = [_measure(table, task.advance) for table in contents.tables]
    return sorted(found, key=lambda each: -each.bytes)


def _measure(table: Table, advance: Callable[[int], None]) -> MeasuredTable:
    norms = np.zeros(_STEPS, np.int64)

    def count_norms(rows: np.ndarray) -> None:
        of_rows = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
        of_rows = of_rows[np.isfinite(of_rows) & (of_rows > 0)]
        place = np.floor((np.log2(of_rows) - _LOWEST) * STEPS_PER_OCTAVE)
        place = np.clip(place, 0, _STEPS - 1).astype(np.int64)
        norms[:] += np.bincount(place, minlength=_STEPS)

    column = table.columns[PARAMETERS]
    statistics = measure(_watched(column, count_norms), advance)
    untouched = [
        _untouched(slot, advance)
        for name, slot in table.columns.items()
        if name not in (PARAMETERS, SCALE)
    ]
    return MeasuredTable(
        table, statistics, norms, min(untouched) if untouched else None
    )


def _watched(column: Column, watch: Callable[[np.ndarray], None]) -> Column:
    """A column that shows each block of rows, [n, width], as it is read."""

    def read(start: int, size: int) -> np.ndarray:
        rows = column.read(start, size)
        watch(rows.reshape(size, -1))
        return rows

    return dataclasses.replace(column, read=read)


def _untouched(slot: Column, advance: Callable[[int], None]) -> int:
    """Rows of a slot that no update has changed.

    A slot begins with zeros, or, if it adds squares up, with one number in all
    rows, which is the least that there is.
    """
    least, count = math.inf, 0

    def count_least(rows: np.ndarray) -> None:
        nonlocal least, count
        same = rows[(rows == rows[:, :1]).all(1), 0]
        if not same.size:
            return
        smallest = float(same.min())
        if smallest < least:
            least, count = smallest, 0
        if smallest == least:
            count += int(np.count_nonzero(same == least))

    found = measure(_watched(slot, count_least), advance)
    if found.zero_rows:
        return found.zero_rows
    # Of rows of one number, one always has the least.
    one_number = math.prod(slot.shape[1:]) == 1
    return 0 if least < 0 or (one_number and count == 1) else count
