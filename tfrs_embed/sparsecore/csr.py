"""A chip's partitions laid out in buffers: the last stage."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from tfrs_embed.sparsecore.coo import Floats, Ints
from tfrs_embed.sparsecore.partitions import Partitions

#: Partitions start at multiples of this, and the padding between them is:
ALIGNMENT = 8
PADDING = np.iinfo(np.int32).max

_Sizes = TypeVar("_Sizes", int, NDArray[np.intp], NDArray[np.int32])


class ChipBuffers(NamedTuple):
    """The buffers that a chip's SparseCores read for one stack.

    The partitions lie one after another, SparseCore by SparseCore and shard by
    shard, each padded to a multiple of 8. TensorFlow's arrays have a static
    size; their contents beyond the unpadded sizes are undefined.

    Attributes:
        row_pointers: int32, where each partition ends.
        sample_ids: int32, see `Partitions.rows`.
        token_ids: int32, see `Partitions.cols`.
        gains: float32.
        row_pointers_unpadded_size: scalar int32.
        ids_unpadded_size: scalar int32.
        num_minibatches_per_physical_sparse_core: scalar int32, always 1.
    """

    row_pointers: Ints
    sample_ids: Ints
    token_ids: Ints
    gains: Floats
    row_pointers_unpadded_size: np.int32
    ids_unpadded_size: np.int32
    num_minibatches_per_physical_sparse_core: np.int32


def wrap(
    parts: Partitions, capacity: int, allow_id_dropping: bool
) -> ChipBuffers:
    """Lays a chip's partitions out in buffers.

    Args:
        parts: the partitions of all its SparseCores, with gains.
        capacity: ids and padding that the buffers may hold.
        allow_id_dropping: drop what exceeds the capacity.

    Returns:
        The buffers, cut at their unpadded sizes.

    Raises:
        ValueError: the capacity is exceeded, or no multiple of 8.
    """
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
        array = np.empty(size, values.dtype)
        array.fill(PADDING)
        # Faster than one assignment by index: ids are far more than slices.
        for target, source in slices:
            array[target] = values[source]
        return array

    assert parts.gains is not None
    return ChipBuffers(
        pointers.ravel(),
        buffer(parts.rows),
        buffer(parts.cols),
        buffer(parts.gains),
        np.int32(pointers.size),
        np.int32(size),
        np.int32(1),
    )


def padded_sizes(sizes: _Sizes) -> _Sizes:
    """Returns sizes rounded up to the alignment of a partition."""
    return -(-sizes // ALIGNMENT) * ALIGNMENT
