"""The largest loads that batches put on SparseCores, as limits."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfrs_embed.sparsecore import buffers
from tfrs_embed.sparsecore.coo import Ids
from tfrs_embed.sparsecore.layout import Layout


class MaxLoads:
    """The largest loads seen so far.

    Args:
        layout: tables and features on a slice.

    Attributes:
        ids: by stack, [shards], most ids from one SparseCore.
        unique_ids: by stack, [shards], most different ids of them.
        size: by stack, ids of the fullest chip buffer, padding included.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        shards, stacks = layout.topology.shards, layout.stacks
        self.ids = {name: np.zeros(shards, np.intp) for name in stacks}
        self.unique_ids = {name: np.zeros(shards, np.intp) for name in stacks}
        self.size = dict.fromkeys(stacks, 0)

    def add(self, ids: Sequence[Ids]) -> dict[str, buffers.Statistics]:
        """Takes a chip's batch into account.

        Args:
            ids: each feature's ids, in the layout's order.

        Returns:
            The batch's own statistics, by stack.

        Raises:
            ValueError: ids do not fit their feature.
        """
        counted = buffers.statistics(self._layout, ids)
        for stack, of_batch in counted.items():
            for most, found in (
                (self.ids, of_batch.ids),
                (self.unique_ids, of_batch.unique_ids),
            ):
                np.maximum(most[stack], found.max(0), out=most[stack])
            self.size[stack] = max(self.size[stack], of_batch.size)
        return counted

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

        stacks = self._layout.stacks
        # A stack's buffer is this times its samples, and a multiple of 8.
        step = math.lcm(*(8 // math.gcd(8, s.samples) for s in stacks.values()))
        per_sample = max(
            limit(self.size[name]) / stack.samples
            for name, stack in stacks.items()
        )
        return dataclasses.replace(
            self._layout.config,
            max_ids_per_table={
                name: limit(int(self.ids[name].max())) for name in stacks
            },
            max_unique_ids_per_table={
                name: limit(int(self.unique_ids[name].max())) for name in stacks
            },
            max_ids_per_chip_per_sample=step * math.ceil(per_sample / step),
        )
