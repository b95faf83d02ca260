"""One feature's ids as (row, col, gain): the first of the host's stages.

`row` is a sample and `col` a row of the stacked table, as TensorFlow names
them; `sc` stands for SparseCore, and a shard is the SparseCore, of all chips,
that owns a col.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]

COMBINERS = ("sum", "mean", "sqrtn")


class Ids(NamedTuple):
    """One feature's ids on one chip.

    Attributes:
        indices_or_row_splits: int32; shape [0] for dense ids, [n, 2] for a
            sparse tensor's indices, [samples + 1] for ragged row splits.
        values: the ids, [n] int32.
        weights: their weights, float32 [n], or one for all; None: ones.
    """

    indices_or_row_splits: Ints
    values: Ints
    weights: Floats | None = None


class Coo(NamedTuple):
    """Ids as (row, col, gain), in ascending order of their samples.

    Attributes:
        rows: [n] int32, the sample's place among those of its SparseCore.
        cols: [n] int32, the row of the stacked table.
        gains: [n] float32, or None where only ids are counted.
        counts: [num_sc] ids of each SparseCore, whose ids lie together.
    """

    rows: Ints
    cols: Ints
    gains: Floats | None
    counts: NDArray[np.intp]


def convert(
    ids: Ids,
    sample_count: int,
    num_sc: int,
    row_offset: int,
    col_offset: int,
    col_shift: int,
    shards: int,
    combiner: str,
    with_gains: bool = True,
) -> Coo:
    """Turns a feature's ids into (row, col, gain).

    Args:
        ids: the feature's ids.
        sample_count: see `convert_to_coo`, as for the next ones.
        num_sc: SparseCores of a chip.
        row_offset: the feature's first sample among the stack's.
        col_offset: its table's first row in the stack.
        col_shift: its table's rotation, in shards.
        shards: SparseCores of all chips, a power of two.
        combiner: "sum", "mean" or "sqrtn".
        with_gains: False leaves the gains out, and the weights unread.

    Returns:
        The ids, neighbours of equal sample and id merged.

    Raises:
        ValueError: the inputs do not fit together.
    """
    if combiner not in COMBINERS:
        raise ValueError(
            f"Invalid combiner {combiner!r}: it must be one of {COMBINERS}."
        )
    if shards < 1 or shards & (shards - 1):
        raise ValueError(f"num_sc_shards {shards} is not a power of two.")
    if sample_count < 1 or sample_count % num_sc:
        raise ValueError(
            f"sample_count {sample_count} is not divisible by the number of "
            f"SparseCores per chip {num_sc}."
        )
    _check_shapes(ids, sample_count)
    values = ids.values
    lengths = _ids_per_sample(ids, sample_count)
    per_sc = sample_count // num_sc
    rows = np.arange(per_sc, dtype=np.int32) + np.int32(row_offset // num_sc)
    rows = np.tile(rows, num_sc)
    gains = None
    if with_gains:
        gains = np.ones(values.size, np.float32)
        if ids.weights is not None:
            gains *= ids.weights
    if lengths is None:
        counts = np.full(num_sc, per_sc, np.intp)
        if gains is not None and combiner != "sum":
            gains *= _inverse(_contributions(gains, combiner), combiner)
    else:
        samples = np.repeat(np.arange(sample_count), lengths)
        again = (values[1:] == values[:-1]) & (samples[1:] == samples[:-1])
        if again.any():
            kept = np.concatenate([[True], ~again])
            values, samples = values[kept], samples[kept]
            if gains is not None:
                gains = merge_gains(gains, kept)
        bounds = np.arange(num_sc + 1) * per_sc
        counts = np.diff(np.searchsorted(samples, bounds))
        rows = rows[samples]
        if gains is not None and combiner != "sum":
            gains *= _scales(ids, lengths, combiner)[samples]
    mask = np.int32(shards - 1)
    cols = values + np.int32(col_shift)
    cols &= mask
    cols += values & ~mask
    cols += np.int32(col_offset)
    return Coo(rows, cols, gains, counts)


def _check_shapes(ids: Ids, sample_count: int) -> None:
    where, values, weights = ids
    if values.ndim != 1:
        raise ValueError(
            "Values input should have dimension 1. But got dimension "
            f"{values.ndim}."
        )
    if weights is not None and weights.ndim > 1:
        raise ValueError(
            "Weights input should have dimension 0 or 1. But got dimension "
            f"{weights.ndim}."
        )
    if (
        weights is not None
        and weights.ndim == 1
        and values.size != weights.size
    ):
        raise ValueError(
            "Values and weights should have same elements. But got "
            f"{values.size} elements for values and {weights.size} elements "
            "for weights."
        )
    if where.shape == (0,):
        if values.size not in (0, sample_count):
            raise ValueError(
                "Dense tensor input should have values elements number the "
                f"same as the sample count. But got {values.size} elements for "
                f"values and sample count as {sample_count}."
            )
    elif where.ndim == 1:
        if where.size != sample_count + 1:
            raise ValueError(
                "Ragged tensor input should have row_splits elements number "
                f"the same as the sample count + 1. But got {where.size} "
                f"elements for row_splits and sample count as {sample_count}."
            )
    elif where.ndim != 2:
        raise ValueError(
            "Invalid indices_or_row_splits input, Got dimension of "
            f"{where.ndim} and size of {where.size}."
        )


def _ids_per_sample(ids: Ids, sample_count: int) -> NDArray[np.intp] | None:
    """Returns how many ids each sample has; None: one each."""
    where, values, _ = ids
    if where.ndim == 2:
        if where.shape[1] != 2 or len(where) != values.size:
            raise ValueError(
                "Invalid indices_or_row_splits input, indices of SparseTensor "
                f"need the shape [{values.size}, 2], a row for each value. "
                f"But got {list(where.shape)}."
            )
        samples = where[:, 0]
        _check_samples(samples, sample_count)
        return np.bincount(samples, minlength=sample_count)
    if where.size:
        lengths = np.diff(where).astype(np.intp)
        if where[0] != 0 or where[-1] != values.size or (lengths < 0).any():
            raise ValueError(
                "Invalid indices_or_row_splits input, row_splits must ascend "
                f"from 0 to the number of values, {values.size}."
            )
        return lengths
    return None if values.size else np.zeros(sample_count, np.intp)


def _check_samples(samples: Ints, sample_count: int) -> None:
    """Raises ValueError for the first sample that is out of order or range."""
    unsorted = np.empty(samples.size, np.bool_)
    unsorted[:1] = samples[:1] < 0
    np.less(samples[1:], samples[:-1], out=unsorted[1:])
    wrong = unsorted | (samples >= sample_count)
    if not wrong.any():
        return
    first = np.argmax(wrong)
    message = "Invalid indices_or_row_splits input, indices of SparseTensor "
    if unsorted[first]:
        raise ValueError(
            message + "need to be sorted in ascending (non-decreasing) order."
        )
    raise ValueError(
        message + f"contained a row_id {samples[first]} that was >= the sample "
        f"count ({sample_count})."
    )


def _scales(ids: Ids, lengths: NDArray[np.intp], combiner: str) -> Floats:
    """Returns what each sample's gains are multiplied by."""
    if ids.weights is None:
        sums = lengths.astype(np.float32)
    else:
        sums = np.zeros(lengths.size, np.float32)
        weights = np.broadcast_to(ids.weights, ids.values.shape)
        # Adds one after another, as the kernels do; np.add.reduceat does not.
        np.add.at(
            sums,
            np.repeat(np.arange(lengths.size), lengths),
            _contributions(weights, combiner),
        )
    return _inverse(sums, combiner)


def _contributions(weights: Floats, combiner: str) -> Floats:
    return weights if combiner == "mean" else weights * weights


def _inverse(sums: Floats, combiner: str) -> Floats:
    if combiner == "sqrtn":
        sums = np.sqrt(sums)
    return np.divide(
        np.float32(1), sums, out=np.zeros_like(sums), where=sums != 0
    )


def merge_gains(gains: Floats, kept: NDArray[np.bool_]) -> Floats:
    """Adds the gains that are not kept, in order, to the kept one before."""
    merged = gains[kept]
    again = np.flatnonzero(~kept)
    # Of `again[i]`, i + 1 of the places up to it are not kept.
    np.add.at(merged, again - np.arange(again.size) - 1, gains[again])
    return merged
