"""One feature's ids as (row, col, gain): the first of the host's stages.

`row` is a sample and `col` a row of the stacked table, as TensorFlow names
them; a shard is the SparseCore, of all chips, that owns a col.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfrs_embed.sparsecore.layout import FeatureLayout, Layout

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class Ids(NamedTuple):
    """One feature's ids on one chip, checked; of several chips as tensors.

    Attributes:
        splits: [samples + 1] int32, where each sample's ids begin, and the last
            one's end.
        values: the ids, [n] int32.
        weights: their weights, [n] float32; None: ones.
    """

    splits: Any
    values: Any
    weights: Any = None


def convert(
    layout: Layout, feature: FeatureLayout, ids: Ids, with_gains: bool
) -> tuple[Ints, Ints, Floats | None]:
    """Turns a feature's ids into (row, col, gain).

    Args:
        layout: the layout.
        feature: the feature in it.
        ids: the feature's ids on a chip.
        with_gains: False leaves the gains out, and the weights unread.

    Returns:
        Of the ids, in the order of their samples, neighbours of equal sample
        and id merged: the rows, [n] int32, the samples' places among the chip's
        of the stack, which lie SparseCore by SparseCore; the cols, [n] int32;
        and the gains, [n] float32 or None.
    """
    num_sc = layout.topology.sparse_cores
    of_core = np.arange(feature.samples // num_sc, dtype=np.int32)
    cores = np.arange(num_sc, dtype=np.int32)[:, np.newaxis]
    first = cores * np.int32(layout.stacks[feature.stack].samples // num_sc)
    rows = (first + of_core + np.int32(feature.row_offset // num_sc)).ravel()
    values, gains = ids.values, None
    if with_gains:
        gains = np.ones(values.size, np.float32)
        if ids.weights is not None:
            gains *= ids.weights
    lengths = np.diff(ids.splits)
    samples: Any = slice(None)
    # Where each sample has one id, nothing is merged nor moved.
    if np.any(lengths != 1):
        samples = np.repeat(np.arange(lengths.size), lengths)
        again = (values[1:] == values[:-1]) & (samples[1:] == samples[:-1])
        if again.any():
            kept = np.concatenate([[True], ~again])
            if gains is not None:
                gains = merge_gains(gains, kept)
            places = np.flatnonzero(kept)  # Faster than the mask.
            values, samples = values[places], samples[places]
    combiner = feature.config.table.combiner
    if gains is not None and combiner != "sum":
        gains *= _scales(ids.weights, lengths, combiner)[samples]
    mask = np.int32(layout.topology.shards - 1)
    cols = values + np.int32(feature.col_shift)
    cols &= mask
    cols += values & ~mask
    cols += np.int32(feature.col_offset)
    return rows[samples], cols, gains


def _scales(
    weights: Floats | None, lengths: NDArray[np.int32], combiner: str
) -> Floats:
    """Returns what each sample's gains are multiplied by."""
    if weights is None:
        sums = lengths.astype(np.float32)
    else:
        sums = np.zeros(lengths.size, np.float32)
        # Adds one after another, as the kernels do; np.add.reduceat does not.
        np.add.at(
            sums,
            np.repeat(np.arange(lengths.size), lengths),
            weights if combiner == "mean" else weights * weights,
        )
    if combiner == "sqrtn":
        sums = np.sqrt(sums)
    return np.divide(
        np.float32(1), sums, out=np.zeros_like(sums), where=sums != 0
    )


def merge_gains(gains: Floats, kept: NDArray[np.bool_]) -> Floats:
    """Adds the gains that are not kept, in order, to the kept one before."""
    merged = gains[np.flatnonzero(kept)]
    again = np.flatnonzero(~kept)
    # Of `again[i]`, i + 1 of the places up to it are not kept.
    np.add.at(merged, again - np.arange(again.size) - 1, gains[again])
    return merged
