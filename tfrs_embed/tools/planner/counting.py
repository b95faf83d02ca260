"""Counts the rows of tables that are looked up most often."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from tfrs_embed.configs.tables import EmbeddingSpec, FeatureSpec, TableSpec
from tfrs_embed.tools.planner.batches import Bags

# Counts of batches are merged when there are so many, or as many as ids known.
_MOST_WAITING = 1 << 20


class _Counter:
    """Counts ids; takes memory for each different id."""

    def __init__(self) -> None:
        empty = np.zeros(0, np.int64)
        # Ids and their counts: of merged batches, then of one batch each.
        self._parts: list[Any] = [(empty, empty)]
        self._waiting = 0

    def add(self, ids: np.ndarray) -> None:
        self._parts.append(np.unique(ids.astype(np.int64), return_counts=True))
        self._waiting += self._parts[-1][0].size
        if self._waiting > max(_MOST_WAITING, self._parts[0][0].size):
            self._merge()

    def _merge(self) -> tuple[np.ndarray, np.ndarray]:
        ids, counts = map(np.concatenate, zip(*self._parts, strict=True))
        ids, index = np.unique(ids, return_inverse=True)
        total = np.zeros(ids.size, np.int64)
        np.add.at(total, index, counts)
        self._parts, self._waiting = [(ids, total)], 0
        return ids, total

    def most_frequent(self, number: int) -> tuple[int, ...]:
        """Returns the most frequent ids, of equally frequent ids the lower."""
        ids, counts = self._merge()
        return tuple(ids[np.argsort(-counts, kind="stable")[:number]].tolist())


def count_hot_rows(
    spec: EmbeddingSpec, batches: Iterable[Mapping[FeatureSpec, Bags]]
) -> dict[str, tuple[int, ...]]:
    """Finds the most frequent rows of tables whose `hot_rows` is a number.

    Returns the `hot_rows` most frequent ids, or fewer, by the table's name.
    Each batch has the ids of each lookup.
    """
    wanted: dict[TableSpec, int] = {
        t: t.hot_rows for t in spec.tables if isinstance(t.hot_rows, int)
    }
    counters = {table: _Counter() for table in wanted}
    for batch in batches:
        for feature, bags in batch.items():
            if feature.table in counters:
                counters[feature.table].add(bags.values)
    return {
        table.name: counters[table].most_frequent(number)
        for table, number in wanted.items()
    }
