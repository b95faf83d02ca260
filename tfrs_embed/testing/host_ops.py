"""SparseCore's host ops in numpy, bit for bit what TensorFlow's kernels give.

Before a step, the host of a TPU chip turns each stack's ids into the buffers
that its SparseCores read, in three ops: convert (per feature), sort (per
SparseCore) and wrap (per chip). Here they are as TensorFlow has them, named
after its ops. The work is in `coo`, `partitions` and `csr`, which
`buffers.preprocess` calls for a whole chip at once. Arguments of TensorFlow's
ops that change nothing are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tfrs_embed.sparsecore.coo import Coo, Floats, Ids, Ints, convert
from tfrs_embed.sparsecore.csr import ChipBuffers, padded_sizes, wrap
from tfrs_embed.sparsecore.partitions import Partitions, check_limits, sort

__all__ = [
    "ChipBuffers",
    "Ids",
    "convert_to_coo",
    "coo_stats",
    "padded_sizes",
    "sort_coo",
    "wrap_coo",
]


def convert_to_coo(
    indices_or_row_splits: Ints,
    values: Ints,
    weights: Floats,
    *,
    sample_count: int,
    num_sc_per_chip: int,
    row_offset: int,
    col_offset: int,
    col_shift: int,
    num_sc_shards: int,
    stacked_table_sample_count: int,
    combiner: str,
) -> tuple[list[Ints], list[Ints], list[Floats]]:
    """`ConvertToListOfSparseCoreCooTensors`: a feature's ids by SparseCore.

    Args:
        indices_or_row_splits: see `Ids`.
        values: see `Ids`.
        weights: see `Ids`.
        sample_count: the feature's samples on this chip.
        num_sc_per_chip: SparseCores of a chip.
        row_offset: the feature's first sample among the stack's.
        col_offset: its table's first row in the stack.
        col_shift: its table's rotation, in shards.
        num_sc_shards: SparseCores of all chips.
        stacked_table_sample_count: the stack's samples on this chip.
        combiner: "sum", "mean" or "sqrtn".

    Returns:
        Row ids, col ids and gains, each a list of one [n] array a SparseCore.

    Raises:
        ValueError: the inputs do not fit together.
    """
    rows, cols, gains, counts = convert(
        Ids(indices_or_row_splits, values, weights),
        sample_count,
        num_sc_per_chip,
        row_offset,
        col_offset,
        col_shift,
        num_sc_shards,
        combiner,
    )
    assert gains is not None
    first = np.arange(num_sc_per_chip, dtype=np.int32)
    first *= stacked_table_sample_count // num_sc_per_chip
    rows += np.repeat(first, counts)
    ends = np.cumsum(counts)[:-1]
    return np.split(rows, ends), np.split(cols, ends), np.split(gains, ends)


def sort_coo(
    row_ids_list: Sequence[Ints],
    col_ids_list: Sequence[Ints],
    gains_list: Sequence[Floats],
    *,
    sample_count_list: Sequence[int],
    col_offset_list: Sequence[int],
    num_replica: int,
    num_sc_per_chip: int,
    max_ids_per_sparse_core: int,
    max_unique_ids_per_sparse_core: int,
    table_name: str,
) -> tuple[Ints, Ints, Floats, Ints]:
    """`SortListOfSparseCoreCooTensors`: a SparseCore's ids by owner shard.

    Args:
        row_ids_list: each feature's rows, [n] int32.
        col_ids_list: each feature's cols, [n] int32.
        gains_list: each feature's gains, [n] float32.
        sample_count_list: each feature's samples on this SparseCore.
        col_offset_list: where each feature's table begins in the stack.
        num_replica: chips.
        num_sc_per_chip: SparseCores of a chip.
        max_ids_per_sparse_core: most ids for one shard.
        max_unique_ids_per_sparse_core: most different ids for one shard.
        table_name: the stack's name, for errors.

    Returns:
        Rows, cols and gains, sorted, [n]; and where each shard's begin,
        [shards + 1] int32.

    Raises:
        ValueError: a limit is exceeded, or the inputs do not fit together.
    """
    for name, limit in (
        ("max_ids_per_sparse_core", max_ids_per_sparse_core),
        ("max_unique_ids_per_sparse_core", max_unique_ids_per_sparse_core),
    ):
        if limit < 1:
            raise ValueError(f"{name} must be > 0")
    parts = _sort_lists(
        row_ids_list,
        col_ids_list,
        gains_list,
        col_offset_list,
        num_replica * num_sc_per_chip,
    )
    check_limits(
        parts,
        max_ids_per_sparse_core,
        max_unique_ids_per_sparse_core,
        table_name,
    )
    assert parts.gains is not None
    starts = np.zeros(parts.ids.size + 1, np.int32)
    np.cumsum(parts.ids[0], out=starts[1:])
    rows = parts.rows % np.int32(sum(sample_count_list))
    return rows, parts.cols, parts.gains, starts


def coo_stats(
    row_ids_list: Sequence[Ints],
    col_ids_list: Sequence[Ints],
    gains_list: Sequence[Floats],
    *,
    col_offset_list: Sequence[int],
    num_replica: int,
    num_sc_per_chip: int,
) -> tuple[np.int32, np.int32]:
    """`GetStatsFromListOfSparseCoreCooTensors`: the limits ids need.

    A table whose ids all lead to col -1, which is outside of any, has one
    different id here and none in the kernel.

    Args:
        row_ids_list: see `sort_coo`, as for the next ones.
        col_ids_list: each feature's cols, [n] int32.
        gains_list: each feature's gains, [n] float32.
        col_offset_list: where each feature's table begins in the stack.
        num_replica: chips.
        num_sc_per_chip: SparseCores of a chip.

    Returns:
        The most ids, and the most different ids, of any shard.

    Raises:
        ValueError: the inputs do not fit together.
    """
    parts = _sort_lists(
        row_ids_list,
        col_ids_list,
        gains_list,
        col_offset_list,
        num_replica * num_sc_per_chip,
    )
    return np.int32(parts.ids.max()), np.int32(parts.unique_ids.max())


def _sort_lists(
    row_ids_list: Sequence[Ints],
    col_ids_list: Sequence[Ints],
    gains_list: Sequence[Floats],
    col_offset_list: Sequence[int],
    shards: int,
) -> Partitions:
    if shards < 1 or shards & (shards - 1):
        raise ValueError("Expected num_physical_replica to be a power of two")
    features = []
    for rows, cols, gains in zip(
        row_ids_list, col_ids_list, gains_list, strict=True
    ):
        for name, what in (("Row ids", rows), ("Gains", gains)):
            if what.size != cols.size:
                raise ValueError(
                    f"{name} and col ids should have same elements. But got "
                    f"{what.size} elements for {name.lower()} and {cols.size} "
                    "elements for col ids."
                )
        features.append(Coo(rows, cols, gains, np.array([cols.size])))
    return sort(features, col_offset_list, shards)


def wrap_coo(
    sorted_row_ids_list: Sequence[Ints],
    sorted_col_ids_list: Sequence[Ints],
    sorted_gains_list: Sequence[Floats],
    id_counts_list: Sequence[Ints],
    *,
    sample_count_per_sc: int,
    num_replica: int,
    max_minibatches_per_sc: int,
    max_ids_per_chip_per_sample: int,
    allow_id_dropping: bool,
) -> ChipBuffers:
    """`ConvertToSparseCoreCsrWrappedCooTensor`, without minibatching.

    Args:
        sorted_row_ids_list: each SparseCore's rows, as `sort_coo` gives them.
        sorted_col_ids_list: each SparseCore's cols.
        sorted_gains_list: each SparseCore's gains.
        id_counts_list: where each shard's begin, [shards + 1].
        sample_count_per_sc: the stack's samples on a SparseCore.
        num_replica: chips.
        max_minibatches_per_sc: sizes row_pointers.
        max_ids_per_chip_per_sample: times the samples is the capacity.
        allow_id_dropping: drop ids that exceed the capacity.

    Returns:
        The chip's buffers, in TensorFlow's static sizes, filled with zeros.

    Raises:
        ValueError: the capacity is exceeded, or no multiple of 8.
    """
    num_sc = len(sorted_row_ids_list)
    shards = num_replica * num_sc
    for sc, (rows, starts) in enumerate(
        zip(sorted_row_ids_list, id_counts_list, strict=True)
    ):
        if starts.size != shards + 1:
            raise ValueError(
                f"The id counts should have {shards + 1} elements. But instead "
                f"got {starts.size} elements."
            )
        if starts[-1] > rows.size:
            raise ValueError(
                f"The last element of id counts {starts[-1]} should not exceed "
                "the size of the corresponding sorted tensors "
                f"{rows.size} for sparsecore {sc}"
            )
    starts = np.stack(id_counts_list)
    ids = (starts[:, 1:] - starts[:, :-1]).astype(np.intp)

    def joined(arrays: Sequence[NDArray]) -> NDArray:
        ends = [starts[-1] for starts in id_counts_list]
        return np.concatenate(
            [a[:end] for a, end in zip(arrays, ends, strict=True)]
        )

    capacity = sample_count_per_sc * num_sc * max_ids_per_chip_per_sample
    chip = wrap(
        Partitions(
            joined(sorted_row_ids_list),
            joined(sorted_col_ids_list),
            joined(sorted_gains_list),
            ids,
            ids,
        ),
        capacity,
        allow_id_dropping,
    )
    pointers = max_minibatches_per_sc * int(chip.row_pointers_unpadded_size)
    return ChipBuffers(
        _extended(chip.row_pointers, pointers),
        _extended(chip.sample_ids, capacity),
        _extended(chip.token_ids, capacity),
        _extended(chip.gains, capacity),
        *chip[4:],
    )


def _extended(array: NDArray, size: int) -> NDArray:
    whole = np.zeros(size, array.dtype)
    whole[: array.size] = array
    return whole
