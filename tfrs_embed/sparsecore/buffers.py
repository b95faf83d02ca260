"""The last stage of host preprocessing: fills a chip's buffers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfrs_embed.sparsecore.coo import Floats, Ids, Ints
from tfrs_embed.sparsecore.layout import Layout, StackLayout
from tfrs_embed.sparsecore.partitions import Partitions, partition

#: Partitions start at multiples of this.
ALIGNMENT = 8
#: The value between partitions.
PADDING = np.iinfo(np.int32).max


class ChipBuffers(NamedTuple):
    """The buffers of a chip's SparseCores for one stack.

    Partitions follow each other, SparseCore by SparseCore and shard by shard,
    each padded to a multiple of 8. TensorFlow's arrays have a static size: they
    begin with these values, and the rest is undefined.

    Attributes:
        row_pointers: int32, the end of each partition.
        sample_ids: int32, see `Partitions.rows`.
        token_ids: int32, see `Partitions.cols`.
        gains: float32.
    """

    row_pointers: Ints
    sample_ids: Ints
    token_ids: Ints
    gains: Floats


def preprocess(layout: Layout, ids: Sequence[Ids]) -> dict[str, ChipBuffers]:
    """Fills one chip's buffers by stack, as `TPUEmbeddingV2.enqueue` does.

    `ids` has each feature's ids on the chip, in the layout's order; they are
    not checked against their tables' rows. A ValueError says which limit or
    capacity is exceeded. Several threads may call this at once.
    """
    stacks = partition(layout, ids, with_gains=True)
    for name, parts in stacks.items():
        _check_limits(parts, layout.stacks[name])
    return {
        name: _wrap(
            parts,
            layout.config.max_ids_per_chip_per_sample
            * layout.stacks[name].samples,
            layout.config.allow_id_dropping,
        )
        for name, parts in stacks.items()
    }


def _check_limits(parts: Partitions, stack: StackLayout) -> None:
    """Raises ValueError for the first partition that exceeds a limit."""
    over = (parts.ids > stack.max_ids) | (
        parts.unique_ids > stack.max_unique_ids
    )
    if not over.any():
        return
    sc, shard = np.argwhere(over)[0]
    ids, limit, kind = parts.ids[sc, shard], stack.max_ids, ""
    if ids <= limit:
        ids, limit = parts.unique_ids[sc, shard], stack.max_unique_ids
        kind = "unique "
    raise ValueError(
        f"Sparse core {shard} gets {ids} {kind}ids while the max {kind}ids per "
        f"sparse core is set to be {limit} for table {stack.name}"
    )


def _wrap(
    parts: Partitions, capacity: int, allow_id_dropping: bool
) -> ChipBuffers:
    """Pads the partitions; drops ids above the capacity if that is allowed."""
    if capacity % ALIGNMENT:
        raise ValueError(
            f"The max_ids_per_chip is set to be {capacity} which is not "
            f"divisible by the xla_pad_size {ALIGNMENT} ."
        )
    num_sc, shards = parts.ids.shape
    counts = parts.ids.ravel()
    padded = padded_sizes(counts)
    starts = np.cumsum(padded) - padded
    size = int(padded.sum())
    if size > capacity and not allow_id_dropping:
        full = np.argmax(starts + counts > capacity)
        raise ValueError(
            f"The max_ids_per_chip is set to be {capacity} which is not going "
            "to fit all ids. The remaining id count is "
            f"{counts[full:].sum()} . Please consider setting the "
            "allow_id_dropping to be true. "
        )
    ends = np.minimum(starts + counts, capacity)
    pointers = np.empty((num_sc, padded_sizes(shards)), np.int32)
    pointers[:, :shards] = ends.reshape(num_sc, shards)
    pointers[:, shards:] = padded_sizes(pointers[:, shards - 1 : shards])
    size = min(size, capacity)
    slices = [
        (slice(start, end), slice(first, first + end - start))
        for start, end, first in zip(
            np.minimum(starts, capacity).tolist(),
            ends.tolist(),
            (np.cumsum(counts) - counts).tolist(),
            strict=True,
        )
    ]

    def buffer(values: NDArray) -> NDArray:
        array = np.full(size, PADDING, values.dtype)
        # Slices are few: this is faster than one assignment by index.
        for target, source in slices:
            array[target] = values[source]
        return array

    assert parts.gains is not None
    return ChipBuffers(
        pointers.ravel(),
        buffer(parts.rows),
        buffer(parts.cols),
        buffer(parts.gains),
    )


def padded_sizes(sizes: Any) -> Any:
    """Rounds sizes (an int, an array or a tensor) up to the alignment."""
    return -(-sizes // ALIGNMENT) * ALIGNMENT
