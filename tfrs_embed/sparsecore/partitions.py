"""A stack's ids sorted by the shards that own them: the second stage."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfrs_embed.sparsecore.coo import (
    Coo,
    Floats,
    Ids,
    Ints,
    convert,
    merge_gains,
)
from tfrs_embed.sparsecore.layout import Layout
from tfrs_embed.sparsecore.topology import Topology


class Partitions(NamedTuple):
    """Ids sorted by SparseCore, owner shard and col, equal (row, col) merged.

    Attributes:
        rows: [n] int32.
        cols: [n] int32, rows of the shard's part of the table.
        gains: [n] float32, or None where only ids are counted.
        ids: [num_sc, shards], the ids of each partition.
        unique_ids: [num_sc, shards], the different ones among them.
    """

    rows: Ints
    cols: Ints
    gains: Floats | None
    ids: NDArray[np.intp]
    unique_ids: NDArray[np.intp]


def partition(
    layout: Layout, ids: Sequence[Ids], with_gains: bool
) -> dict[str, Partitions]:
    """Sorts a chip's ids, whatever the limits.

    Args:
        layout: the layout.
        ids: each feature's ids on the chip, in the layout's order.
        with_gains: False leaves the gains out, and the weights unread.

    Returns:
        The partitions of each stack, by its name.
    """
    coos: dict[str, list[Coo]] = {name: [] for name in layout.stacks}
    offsets: dict[str, list[int]] = {name: [] for name in layout.stacks}
    for feature, given in zip(layout.features, ids, strict=True):
        coos[feature.stack].append(convert(layout, feature, given, with_gains))
        offsets[feature.stack].append(feature.col_offset)
    return {
        name: sort(features, offsets[name], stack.samples, layout.topology)
        for (name, stack), features in zip(
            layout.stacks.items(), coos.values(), strict=True
        )
    }


def sort(
    features: Sequence[Coo],
    col_offsets: Sequence[int],
    samples: int,
    topology: Topology,
) -> Partitions:
    """Sorts a stack's ids on a chip.

    Args:
        features: the stack's features.
        col_offsets: where each feature's table begins in the stack.
        samples: the stack's samples on the chip.
        topology: the slice.

    Returns:
        The partitions.
    """
    rows = np.concatenate([f.rows for f in features])
    cols = np.concatenate([f.cols for f in features]).view(np.uint32)
    _, tables = np.unique(np.asarray(col_offsets), return_inverse=True)
    tables = np.repeat(tables, [f.rows.size for f in features])
    per_core = np.int32(samples // topology.sparse_cores)
    cores = rows // per_core  # Faster than `np.divmod`.
    rows -= cores * per_core
    # Everything that decides the order, and the place an id came from, in one
    # integer: numpy sorts these several times faster than it sorts places by
    # keys. From the top: SparseCore, shard, table, row of the shard, place.
    shards = topology.shards
    shard_bits = (shards - 1).bit_length()
    row_bits = 32 - shard_bits
    table_bits = int(tables.max(initial=0)).bit_length()
    shard_shift = np.uint64(table_bits + row_bits)
    key = cores.astype(np.uint64) << np.uint64(shard_bits)
    key |= cols & np.uint32(shards - 1)
    key <<= shard_shift
    key |= cols >> np.uint32(shard_bits)
    if table_bits:
        key |= tables.astype(np.uint64) << np.uint64(row_bits)
    partitions = topology.sparse_cores * shards
    place_bits = max(rows.size - 1, 0).bit_length()
    key_bits = (partitions - 1).bit_length() + table_bits + row_bits
    if key_bits + place_bits <= 64:
        key <<= np.uint64(place_bits)
        key |= np.arange(rows.size, dtype=np.uint64)
        key.sort()
        place = (key & np.uint64((1 << place_bits) - 1)).view(np.int64)
        key >>= np.uint64(place_bits)
    else:
        place = np.argsort(key, kind="stable")
        key = key[place]
    rows = rows[place]
    gains = None
    if features[0].gains is not None:
        # All features have gains, or none.
        gains = np.concatenate([f.gains for f in features])[place]
    bounds = np.arange(partitions + 1, dtype=np.uint64) << shard_shift
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
    # A shard's row has its sign, if the col had one.
    owned = key.astype(np.uint32) << np.uint32(shard_bits)
    own_cols = owned.view(np.int32) >> np.int32(shard_bits)
    shape = (topology.sparse_cores, shards)
    return Partitions(
        rows, own_cols, gains, ids.reshape(shape), unique_ids.reshape(shape)
    )


def _count(
    chosen: NDArray[np.bool_], ends: NDArray[np.intp]
) -> NDArray[np.intp]:
    """Returns how many are chosen between each two neighbouring ends."""
    return np.array(
        [np.count_nonzero(chosen[i:j]) for i, j in itertools.pairwise(ends)]
    )
