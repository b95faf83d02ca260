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

# Norms are counted in bins, 8 for each power of two from 2**-32 to 2**32.
_EDGES = 2.0 ** (np.arange(-256, 257) / 8)
#: The middle of each bin.
NORM_BINS = 2.0 ** ((np.arange(-256, 256) + 0.5) / 8)


@dataclasses.dataclass(frozen=True)
class MeasuredTable:
    """A table and the statistics of its values.

    Attributes:
        table: the table.
        statistics: those of its parameters.
        norms: the number of rows by their norm, in the bins of `NORM_BINS`;
            norms beyond are in the first and the last bin. Rows whose norm is
            zero or not finite aren't counted.
        untouched: the number of rows whose slots are as they were before the
            first update; None: there are no slots.
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

    @property
    def zero_share(self) -> float:
        """The share of rows that are zero."""
        return self.statistics.zero_rows / max(1, self.rows)

    @property
    def untouched_share(self) -> float | None:
        """The share of rows in `untouched`."""
        if self.untouched is None:
            return None
        return self.untouched / max(1, self.rows)


def measure_tables(contents: Contents) -> list[MeasuredTable]:
    """Reads and measures all tables; returns the largest first."""
    total = sum(c.nbytes for t in contents.tables for c in t.columns.values())
    name = os.path.basename(contents.path.rstrip("/"))
    with progress.Task("Reading", f"'{name}'", total) as task:
        found = [_measure(table, task.advance) for table in contents.tables]
    return sorted(found, key=lambda each: -each.bytes)


def _measure(table: Table, advance: Callable[[int], None]) -> MeasuredTable:
    norms = np.zeros(len(NORM_BINS), np.int64)

    def count_norms(rows: np.ndarray) -> None:
        of_rows = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
        of_rows = of_rows[np.isfinite(of_rows) & (of_rows > 0)]
        of_rows = of_rows.clip(_EDGES[0], _EDGES[-1])
        norms[:] += np.histogram(of_rows, _EDGES)[0]

    statistics = measure(table.columns[PARAMETERS], advance, count_norms)
    untouched = [
        _untouched(slot, advance)
        for name, slot in table.columns.items()
        if name not in (PARAMETERS, SCALE)
    ]
    return MeasuredTable(
        table, statistics, norms, min(untouched) if untouched else None
    )


def _untouched(slot: Column, advance: Callable[[int], None]) -> int:
    """Counts the rows of a slot that no update has changed.

    A checkpoint doesn't hold the slot's initial value. It is taken to be zero,
    or, of slots that add squares up, the least row of one number.
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

    zero_rows = measure(slot, advance, count_least).zero_rows
    if zero_rows:
        return zero_rows
    # In a slot of one number a row, some row always has the least number.
    one_number = math.prod(slot.shape[1:]) == 1
    return 0 if least < 0 or (one_number and count == 1) else count
