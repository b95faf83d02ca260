"""Rows of tables, read in blocks and compared with what they were."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from tfrs_embed.checkpoint.rows import HeldRows

#: Rows are read in blocks of this many bytes.
BLOCK_BYTES = 4 << 20
#: Of at most this many rows the values are kept, for the norms of updates.
KEPT_ROWS = 10_000


def sample(held: HeldRows, most: int | None) -> np.ndarray:
    """Numbers of rows to read, [n] int64, ascending.

    They are the same each time; of a table of keys the same keys, as long as it
    doesn't double.

    Args:
        held: the rows.
        most: about how many; None: all.
    """
    if most is None or held.rows <= most:
        return np.arange(held.rows, dtype=np.int64)
    if held.keys is None:
        # One of each of equal parts, at a place of its own: ids have periods.
        edges = np.linspace(0, held.rows, most + 1).astype(np.int64)
        inside = np.random.default_rng(most).random(most)
        return edges[:-1] + (inside * np.diff(edges)).astype(np.int64)
    # The keys whose hashes end with zeros: a power of two of them.
    bits = int(np.ceil(np.log2(held.rows / most)))
    hashed = (held.keys.view(np.uint64) * _ODD) >> np.uint64(64 - bits)
    return np.flatnonzero(hashed == 0)


_ODD = np.uint64(0x9E3779B97F4A7C15)


def read(held: HeldRows, numbers: np.ndarray) -> Iterator[np.ndarray]:
    """Yields rows, [n, dim], block by block, in the host's memory."""
    row = max(1, held.bytes // max(1, held.rows))
    size = max(1, BLOCK_BYTES // row)
    for start in range(0, len(numbers), size):
        rows = held.gather(numbers[start : start + size]).numpy()
        yield rows.reshape(len(rows), -1)


def norms(rows: np.ndarray) -> np.ndarray:
    """Euclidean norms of rows, [n] float32; NaN or infinite if the row is."""
    wide = rows.astype(np.float32, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        return np.sqrt(np.einsum("ij,ij->i", wide, wide))


def fingerprints(rows: np.ndarray) -> np.ndarray:
    """A number for each row, [n] uint64, by which a change is seen.

    It is a sum of the row's words, each times an odd number of its own, modulo
    2 ** 64. A change of one word changes it; several changes together leave it
    as it is with a probability of about 2 ** -63.
    """
    word = np.dtype(f"u{min(rows.dtype.itemsize, 8)}")
    words = np.ascontiguousarray(rows).view(word).astype(np.uint64)
    random = np.random.default_rng(7).integers(
        0, 1 << 63, words.shape[1], np.uint64
    )
    return words @ (random * np.uint64(2) + np.uint64(1))


@dataclasses.dataclass(eq=False)
class Seen:
    """Rows as they were in the last report.

    Attributes:
        ids: the rows' numbers or keys, [n] int64, ascending.
        fingerprints: of these rows, [n] uint64.
        changed: the step of the last report that found a row changed, [n]
            int64; of those that never were, that of the first, less one.
        first: the first report's step.
        kept: places in `ids` of rows whose values are kept, ascending, [k].
        values: these values, [k, dim].
    """

    ids: np.ndarray
    fingerprints: np.ndarray
    changed: np.ndarray
    first: int
    kept: np.ndarray
    values: np.ndarray

    def find(self, ids: np.ndarray) -> np.ndarray:
        """The places of rows in `ids`, [n]; -1: it isn't among them."""
        return find(self.ids, ids)


def find(among: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Places of numbers among others.

    Args:
        among: [m], ascending.
        ids: [n].

    Returns:
        [n]; -1 for those that are not there.
    """
    if not len(among):
        return np.full(len(ids), -1)
    place = np.minimum(np.searchsorted(among, ids), len(among) - 1)
    return np.where(among[place] == ids, place, -1)
