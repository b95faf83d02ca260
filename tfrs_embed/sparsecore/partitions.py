"""The second stage of host preprocessing: sorts a stack's ids by shard."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfrs_embed.sparsecore.coo import Floats, Ids, Ints, convert, merge_gains
from tfrs_embed.sparsecore.layout import Layout
from tfrs_embed.sparsecore.topology import Topology


class Partitions(NamedTuple):
    """Ids sorted by SparseCore, shard and col; equal (row, col) are merged.

    Attributes:
        rows: [n] int32, samples of the SparseCore.
        cols: [n] int32, rows of the shard.
        gains: [n] float32, or None.
        ids: [num_sc, shards], the number of ids of each partition.
        unique_ids: the same of unique ids.
    """

    rows: Ints
    cols: Ints
    gains: Floats | None
    ids: NDArray[np.intp]
    unique_ids: NDArray[np.intp]


def partition(
    layout: Layout, ids: Sequence[Ids], with_gains: bool
) -> dict[str, Partitions]:
    """Sorts a chip's ids into partitions by stack, without checking limits.

    `ids` has each feature's ids on the chip, in the layout's order;
    `with_gains` is that of `convert`.
    """
    features: dict[str, list[Any]] = {name: [] for name in layout.stacks}
    for feature, given in zip(layout.features, ids, strict=True):
        coo = convert(layout, feature, given, with_gains)
        features[feature.stack].append((feature.col_offset, *coo))
    return {
        name: _sort_stack(features[name], stack.samples, layout.topology)
        for name, stack in layout.stacks.items()
    }


def _sort_stack(
    features: Sequence[tuple[int, Ints, Ints, Floats | None]],
    samples: int,
    topology: Topology,
) -> Partitions:
    """Sorts a stack's ids on a chip.

    `features` has the first row of each feature's table in the stack, and the
    rows, cols and gains of its ids.
    """
    offsets, rows, cols, gains = zip(*features, strict=True)
    _, tables = np.unique(offsets, return_inverse=True)
    per_core = samples // topology.sparse_cores
    starts = np.arange(topology.sparse_cores + 1, dtype=np.int32) * per_core
    # A feature's ids of one SparseCore are neighbours.
    bounds = np.stack([np.searchsorted(each, starts) for each in rows], 1)
    # One SparseCore at a time: its ids fit into a processor's cache.
    sorted_ids = []
    for sc, (first, end) in enumerate(itertools.pairwise(bounds)):
        parts = [slice(*p) for p in zip(first, end, strict=True)]
        sorted_ids.append(
            sort(
                _join(rows, parts) - starts[sc],
                _join(cols, parts),
                None if gains[0] is None else _join(gains, parts),
                np.repeat(tables, end - first),
                topology.shards,
            )
        )
    rows, cols, gains, ids, unique_ids = zip(*sorted_ids, strict=True)
    return Partitions(
        np.concatenate(rows),
        np.concatenate(cols),
        None if gains[0] is None else np.concatenate(gains),
        np.stack(ids),
        np.stack(unique_ids),
    )


def _join(arrays: Sequence[NDArray], parts: Sequence[slice]) -> NDArray:
    pairs = zip(arrays, parts, strict=True)
    return np.concatenate([array[part] for array, part in pairs])


def sort(
    rows: Ints,
    cols: Ints,
    gains: Floats | None,
    tables: NDArray[np.intp],
    shards: int,
) -> Partitions:
    """Sorts one SparseCore's ids; `tables` numbers each id's table."""
    # One integer has all that decides the order, and the id's place: numpy
    # sorts integers several times faster than it sorts places by keys. From
    # the highest bits: shard, table, row of the shard, place.
    shard_bits = (shards - 1).bit_length()
    row_bits = 32 - shard_bits
    table_bits = int(tables.max(initial=0)).bit_length()
    place_bits = max(rows.size - 1, 0).bit_length()
    shard_shift = np.uint64(table_bits + row_bits)
    unsigned = cols.view(np.uint32)
    key = (unsigned & np.uint32(shards - 1)).astype(np.uint64)
    key <<= shard_shift
    key |= unsigned >> np.uint32(shard_bits)
    if table_bits:
        key |= tables.astype(np.uint64) << np.uint64(row_bits)
    if table_bits + 32 + place_bits <= 64:
        key <<= np.uint64(place_bits)
        key |= np.arange(rows.size, dtype=np.uint64)
        key.sort()
        place = (key & np.uint64((1 << place_bits) - 1)).view(np.int64)
        key >>= np.uint64(place_bits)
    else:
        place = np.argsort(key, kind="stable")
        key = key[place]
    rows = rows[place]
    if gains is not None:
        gains = gains[place]
    bounds = np.arange(shards + 1, dtype=np.uint64) << shard_shift
    ends = np.searchsorted(key, bounds)
    first = np.ones(rows.size, np.bool_)
    np.not_equal(key[1:], key[:-1], out=first[1:])
    unique_ids = _count(first, ends)
    kept = first
    kept[1:] |= rows[1:] != rows[:-1]
    ids = _count(kept, ends)
    if ids.sum() < rows.size:
        key, rows = key[kept], rows[kept]
        if gains is not None:
            gains = merge_gains(gains, kept)
    # The shift keeps the sign of a negative col.
    owned = key.astype(np.uint32) << np.uint32(shard_bits)
    cols = owned.view(np.int32) >> np.int32(shard_bits)
    return Partitions(rows, cols, gains, ids, unique_ids)


def _count(
    chosen: NDArray[np.bool_], ends: NDArray[np.intp]
) -> NDArray[np.intp]:
    """The number of chosen ids between neighbouring ends."""
    return np.array(
        [np.count_nonzero(chosen[i:j]) for i, j in itertools.pairwise(ends)]
    )
