"""From a chip's ids to the buffers of its SparseCores, all features at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfrs_embed.sparsecore.coo import Coo, Ids, convert
from tfrs_embed.sparsecore.csr import ChipBuffers, padded_sizes, wrap
from tfrs_embed.sparsecore.layout import Layout
from tfrs_embed.sparsecore.partitions import Partitions, check_limits, sort


class Statistics(NamedTuple):
    """The load of a stack's partitions on one chip.

    Attributes:
        ids: [sparse_cores, shards], ids that each SparseCore sends each shard.
        unique_ids: [sparse_cores, shards], the different ones among them.
        size: ids of the chip's buffer, its padding included.
    """

    ids: NDArray[np.intp]
    unique_ids: NDArray[np.intp]
    size: int


def preprocess(layout: Layout, ids: Sequence[Ids]) -> dict[str, ChipBuffers]:
    """Fills one chip's buffers, as `TPUEmbeddingV2.enqueue` does.

    Touches nothing shared: may run in several threads at once.

    Args:
        layout: the layout, with the limits of each stack.
        ids: each feature's ids on this chip, in the layout's order.

    Returns:
        The buffers of each stack, by its name; cut at their unpadded sizes, as
        TensorFlow's static ones are mostly room for more ids.

    Raises:
        ValueError: a limit or the capacity is exceeded, or ids do not fit
            their feature; no id is checked against its table's rows.
    """
    stacks = _sort(layout, ids, with_gains=True)
    for name, parts in stacks.items():
        stack = layout.stacks[name]
        check_limits(parts, stack.max_ids, stack.max_unique_ids, name)
    return {
        name: wrap(
            parts,
            layout.config.max_ids_per_chip_per_sample
            * layout.stacks[name].samples,
            layout.config.allow_id_dropping,
        )
        for name, parts in stacks.items()
    }


def statistics(layout: Layout, ids: Sequence[Ids]) -> dict[str, Statistics]:
    """Counts what would be in one chip's buffers, whatever the limits.

    Args:
        layout: the layout.
        ids: see `preprocess`; weights are not read.

    Returns:
        The statistics of each stack, by its name.

    Raises:
        ValueError: ids do not fit their feature.
    """
    return {
        name: Statistics(
            parts.ids,
            parts.unique_ids,
            int(np.sum(padded_sizes(parts.ids))),
        )
        for name, parts in _sort(layout, ids, with_gains=False).items()
    }


def _sort(
    layout: Layout, ids: Sequence[Ids], with_gains: bool
) -> dict[str, Partitions]:
    num_sc = layout.topology.sparse_cores
    shards = layout.topology.shards
    coos: dict[str, list[Coo]] = {name: [] for name in layout.stacks}
    offsets: dict[str, list[int]] = {name: [] for name in layout.stacks}
    for feature, given in zip(layout.features, ids, strict=True):
        coo = convert(
            given,
            feature.samples,
            num_sc,
            feature.row_offset,
            feature.col_offset,
            feature.col_shift,
            shards,
            feature.config.table.combiner,
            with_gains,
        )
        coos[feature.stack].append(coo)
        offsets[feature.stack].append(feature.col_offset)
    return {
        name: sort(features, offsets[name], shards)
        for name, features in coos.items()
    }
