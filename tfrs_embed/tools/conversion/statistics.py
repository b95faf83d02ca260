"""Statistics of a table's values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from tfrs_embed.tools.conversion.contents import Column


@dataclasses.dataclass(frozen=True)
class Statistics:
    """Statistics of a column's values; norms are of the finite values.

    Attributes:
        norm: the Frobenius norm.
        mean_row_norm: the mean of the rows' norms.
        max_row_norm: the largest of the rows' norms.
        zero_rows: the number of rows that are all zero.
        nan: the number of values that are NaN.
        inf: the number of values that are infinite.
    """

    norm: float
    mean_row_norm: float
    max_row_norm: float
    zero_rows: int
    nan: int
    inf: int


def measure(
    column: Column,
    progress: Callable[[int], None],
    watch: Callable[[np.ndarray], None] = lambda rows: None,
) -> Statistics:
    """Reads a column in blocks, and measures its values.

    `watch` is called with each block, [n, width].
    """
    squares = norms = largest = 0.0
    zero_rows = nan = inf = 0
    for _, rows in column.blocks(progress):
        # A slot with one number for each row has rows of one number.
        rows = rows.reshape(len(rows), -1)
        watch(rows)
        zero_rows += len(rows) - int(np.count_nonzero(rows.any(1)))
        finite = np.isfinite(rows)
        if not finite.all():
            of_block = int(np.count_nonzero(np.isnan(rows)))
            nan += of_block
            inf += rows.size - int(np.count_nonzero(finite)) - of_block
            rows = np.where(finite, rows, 0)
        row_squares = np.einsum("ij,ij->i", rows, rows, dtype=np.float64)
        squares += float(row_squares.sum())
        row_norms = np.sqrt(row_squares)
        norms += float(row_norms.sum())
        largest = max(largest, float(row_norms.max(initial=0)))
    return Statistics(
        norm=math.sqrt(squares),
        mean_row_norm=norms / max(1, column.shape[0]),
        max_row_norm=largest,
        zero_rows=zero_rows,
        nan=nan,
        inf=inf,
    )
