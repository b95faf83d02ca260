"""The first stage of host preprocessing: a feature's ids as (row, col, gain).

In TensorFlow's names a row is a sample, and a col is a row of the stacked
table. The shard of a col is the SparseCore, of all chips, that holds it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfrs_embed.sparsecore.layout import FeatureLayout, Layout

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]


class Ids(NamedTuple):
    """One feature's checked ids: arrays of one chip, or tensors of several.

    `splits` [samples + 1] int32 has the first id of each sample, and the end;
    `values` [n] int32 are the ids, `weights` [n] float32 their weights or None.
    """

    splits: Any
    values: Any
    weights: Any = None


def convert(
    layout: Layout, feature: FeatureLayout, ids: Ids, with_gains: bool
) -> tuple[Ints, Ints, Floats | None]:
    """Converts a feature's ids on a chip to rows, cols and gains, [n] each.

    They are in the order of the samples; equal neighbours of one sample are
    merged. Rows number the chip's samples of the stack, SparseCore by
    SparseCore. Without `with_gains` gains are None, and weights are not read.
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
    # If each sample has one id, nothing is merged.
    if np.any(lengths != 1):
        samples = np.repeat(np.arange(lengths.size), lengths)
        again = (values[1:] == values[:-1]) & (samples[1:] == samples[:-1])
        if again.any():
            kept = np.concatenate([[True], ~again])
            if gains is not None:
                gains = merge_gains(gains, kept)
            places = np.flatnonzero(kept)  # Faster than a mask.
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
    """The factor of each sample's gains."""
    if weights is None:
        sums = lengths.astype(np.float32)
    else:
        sums = np.zeros(lengths.size, np.float32)
        # The kernels add one by one, as np.add.at does; np.add.reduceat
        # doesn't.
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
    """Adds each gain that is not kept to the kept gain before it, in order."""
    merged = gains[np.flatnonzero(kept)]
    again = np.flatnonzero(~kept)
    # Up to again[i] there are i + 1 gains that are not kept.
    np.add.at(merged, again - np.arange(again.size) - 1, gains[again])
    return merged
