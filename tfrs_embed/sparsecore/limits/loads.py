"""The loads that batches put on SparseCores, and the limits that hold them."""

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
    """The loads of a stack, over all batches seen so far.

    Attributes:
        ids: [shards], most ids from one SparseCore.
        unique_ids: [shards], most different ids of them.
        total: [shards], ids of all batches.
        size: ids of the fullest chip buffer, padding included.
    """

    ids: np.ndarray
    unique_ids: np.ndarray
    total: np.ndarray
    size: int = 0


class Loads:
    """The loads of all stacks.

    Args:
        layout: tables and features on a slice.

    Attributes:
        stacks: each stack's loads by its name.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        none = np.zeros(layout.topology.shards, np.intp)
        self.stacks = {
            name: StackLoads(none, none, none) for name in layout.stacks
        }

    def add(self, ids: Sequence[Ids]) -> None:
        """Takes a chip's batch into account: each feature's ids."""
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
        """The layout's `SparseCoreEmbeddingConfig` with limits for the loads.

        Args:
            safety: factor by which the loads are raised, at least 1.

        Returns:
            The configuration, with the smallest limits that hold these.
        """

        def limit(most: int) -> int:
            # A float's product may be a little larger than the exact one.
            return max(1, math.ceil(round(most * safety, 6)))

        samples = {n: s.samples for n, s in self._layout.stacks.items()}
        # A stack's buffer is this times its samples, and a multiple of 8.
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
    """Splits a lookup's bags over chips, as ids without weights.

    Args:
        bags: the bags of a global batch, at most `samples` for each chip.
        samples: a chip's samples; a chip with fewer is padded.
        chips: the number of chips.
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
