"""The reading of tables' rows, block by block, in the host's memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from tfrs_embed.checkpoint.rows import HeldRows
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.storage.table_state import TableState

#: The size of a block, in bytes.
BLOCK_BYTES = 4 << 20
#: The most rows of a shard whose values are kept, for changes between reports.
KEPT_ROWS = 10_000

_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclasses.dataclass(eq=False)
class ReadRows:
    """Rows that were read for a report, in any order.

    Attributes:
        norms: Euclidean norms, [n] float32; NaN or infinite if the row is, or
            if its norm overflows.
        nonfinite: the number of rows with a NaN or an infinity.
        untouched: the share of rows whose slots all have their initial values;
            None: there are no slots, or no rows.
        ids: the numbers or keys of the rows whose values are kept, [k] int64.
        values: these rows, [k, dim].
    """

    norms: np.ndarray
    nonfinite: int
    untouched: float | None
    ids: np.ndarray
    values: np.ndarray


def read(state: TableState, most: int | None) -> ReadRows:
    """Reads the rows of a table that this process holds.

    Args:
        state: the table.
        most: about how many rows of a shard to read; None: all.
    """
    slots = [
        (state.saved[name].held(), slot.initial)
        for name, slot in state.rule_slots.items()
    ]
    dtype = state.table.dtype.as_numpy_dtype
    ids = [np.zeros(0, np.int64)]
    values = [np.zeros([0, state.spec.dim], dtype)]
    lengths = [np.zeros(0, np.float32)]
    untouched = [np.zeros(0, bool)]
    nonfinite, offset = 0, 0
    for shard, part in enumerate(state.saved[PARAMETERS].held()):
        numbers = sample(part, most)
        kept = sample(part, min(most or KEPT_ROWS, KEPT_ROWS))
        ids.append(kept + offset if part.keys is None else part.keys[kept])
        values += _blocks(part, kept)
        offset += part.rows
        for block in _blocks(part, numbers):
            length = norms(block)
            lengths.append(length)
            # The norm of large finite numbers may overflow.
            bad = block[~np.isfinite(length)].astype(np.float64)
            nonfinite += int(np.count_nonzero(~np.isfinite(bad).all(1)))
        initial = np.ones(len(numbers), bool)
        for parts, value in slots:
            blocks = _blocks(parts[shard], numbers)
            same = [(b == np.asarray(value, b.dtype)).all(1) for b in blocks]
            initial &= np.concatenate([np.zeros(0, bool), *same])
        untouched.append(initial)
    every = np.concatenate(untouched)
    return ReadRows(
        np.concatenate(lengths),
        nonfinite,
        float(every.mean()) if slots and every.size else None,
        np.concatenate(ids),
        np.concatenate(values),
    )


def sample(held: HeldRows, most: int | None) -> np.ndarray:
    """Returns numbers of rows to read, [n] int64, ascending.

    They are the same each time; in a table of keys those of the same keys, as
    long as the table doesn't double.

    Args:
        held: the rows.
        most: about how many; None: all.
    """
    if most is None or held.rows <= most:
        return np.arange(held.rows, dtype=np.int64)
    if held.keys is None:
        # A random row of each of equal parts: ids often have periods.
        edges = np.linspace(0, held.rows, most + 1).astype(np.int64)
        inside = np.random.default_rng(most).random(most)
        return edges[:-1] + (inside * np.diff(edges)).astype(np.int64)
    # Keys whose hashes begin with a number of zero bits.
    bits = int(np.ceil(np.log2(held.rows / most)))
    hashed = (held.keys.view(np.uint64) * _ODD) >> np.uint64(64 - bits)
    return np.flatnonzero(hashed == 0)


def _blocks(held: HeldRows, numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Yields rows, [n, width], block by block."""
    row = max(1, held.bytes // max(1, held.rows))
    size = max(1, BLOCK_BYTES // row)
    for start in range(0, len(numbers), size):
        rows = held.gather(numbers[start : start + size]).numpy()
        yield rows.reshape(len(rows), -1)


def norms(rows: np.ndarray) -> np.ndarray:
    """Returns Euclidean norms of rows, [n] float32; see `ReadRows.norms`."""
    wide = rows.astype(np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.sqrt(np.einsum("ij,ij->i", wide, wide))


def common(
    before: np.ndarray, now: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the places in two arrays of unique ids of those in both, [n]."""
    if np.array_equal(before, now):  # As in tables without keys.
        every = np.arange(len(now))
        return every, every
    _, old, new = np.intersect1d(
        before, now, assume_unique=True, return_indices=True
    )
    return old, new
