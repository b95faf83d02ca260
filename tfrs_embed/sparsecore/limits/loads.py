"""The loads that batches put on SparseCores, and the limits for these loads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.sparsecore.buffers import padded_sizes
from tfrs_embed.sparsecore.coo import Ids
from tfrs_embed.sparsecore.layout import Layout
from tfrs_embed.sparsecore.partitions import partition


@dataclasses.dataclass
class StackLoads:
    """A stack's loads over all batches so far.

    Attributes:
        ids: [shards], the most ids from one SparseCore in a batch.
        unique_ids: the same of unique ids.
        total: [shards], the ids of all batches.
        size: the ids of the fullest chip buffer, padding included.
    """

    ids: np.ndarray
    unique_ids: np.ndarray
    total: np.ndarray
    size: int = 0


class Loads:
    """The loads of a layout's stacks, by name in `stacks`."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        none = np.zeros(layout.topology.shards, np.intp)
        self.stacks = {
            name: StackLoads(none, none, none) for name in layout.stacks
        }

    def add(self, ids: Sequence[Ids]) -> None:
        """Counts a chip's batch, each feature's ids."""
        stacks = partition(self._layout, ids, with_gains=False)
        for name, parts in stacks.items():
            loads = self.stacks[name]
            loads.ids = np.maximum(loads.ids, parts.ids.max(0))
            loads.unique_ids = np.maximum(
                loads.unique_ids, parts.unique_ids.max(0)
            )
            loads.total = loads.total + parts.ids.sum(0)
            size = int(padded_sizes(parts.ids).sum())
            loads.size = max(loads.size, size)

    def config(self, safety: float = 1.0) -> Any:
        """The layout's config with limits for `safety` times the loads."""

        def limit(most: int) -> int:
            # Without rounding, a product of floats may be a little too large.
            return max(1, math.ceil(round(most * safety, 6)))

        samples = {n: s.samples for n, s in self._layout.stacks.items()}
        # Times each stack's samples, the result must be a multiple of 8.
        step = math.lcm(*(8 // math.gcd(8, n) for n in samples.values()))
        per_sample = max(
            limit(loads.size) / samples[name]
            for name, loads in self.stacks.items()
        )
        return dataclasses.replace(
            self._layout.config,
            max_ids_per_table={
                name: limit(int(loads.ids.max()))
                for name, loads in self.stacks.items()
            },
            max_unique_ids_per_table={
                name: limit(int(loads.unique_ids.max()))
                for name, loads in self.stacks.items()
            },
            max_ids_per_chip_per_sample=step * math.ceil(per_sample / step),
        )


def of_chips(bags: BaggedIds, samples: int, chips: int = 1) -> list[Ids]:
    """Splits the bags of a lookup's global batch over chips, without weights.

    Each chip has `samples` samples; a chip with fewer bags is padded.
    """
    count = int(bags.count)
    starts = np.arange(count + 1)
    if bags.bag_size != 1:
        starts = np.searchsorted(bags.bag_of_id().numpy(), starts)
    values = bags.ids.numpy().astype(np.int32)
    share = -(-count // chips)
    ids = []
    for chip in range(chips):
        first, last = chip * share, min((chip + 1) * share, count)
        splits = starts[np.minimum(first + np.arange(samples + 1), last)]
        ids.append(
            Ids(
                (splits - splits[0]).astype(np.int32),
                values[splits[0] : splits[-1]],
            )
        )
    return ids
