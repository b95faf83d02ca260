"""Counts the rows of tables that are looked up most often."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from tfrs_embed.configs.tables import EmbeddingSpec, FeatureSpec, TableSpec
from tfrs_embed.tools.planner.batches import Bags

# Counts of batches are merged when there are so many, or as many as ids known.
_MOST_WAITING = 1 << 20


class _Counter:
    """Counts ids; takes memory for each different id."""

    def __init__(self) -> None:
        self._ids = np.zeros(0, np.int64)
        self._counts = np.zeros(0, np.int64)
        self._waiting: list[tuple[np.ndarray, np.ndarray]] = []
        self._size = 0

    def add(self, ids: np.ndarray) -> None:
        unique, counts = np.unique(ids.astype(np.int64), return_counts=True)
        self._waiting.append((unique, counts))
        self._size += unique.size
        if self._size > max(_MOST_WAITING, self._ids.size):
            self._merge()

    def _merge(self) -> None:
        parts = [(self._ids, self._counts), *self._waiting]
        ids, counts = (
            np.concatenate(each) for each in zip(*parts, strict=True)
        )
        self._ids, index = np.unique(ids, return_inverse=True)
        self._counts = np.zeros(self._ids.size, np.int64)
        np.add.at(self._counts, index, counts)
        self._waiting, self._size = [], 0

    def most_frequent(self, number: int) -> tuple[int, ...]:
        """Returns the most frequent ids, of equally frequent ids the lower."""
        self._merge()
        order = np.argsort(-self._counts, kind="stable")[:number]
        return tuple(self._ids[order].tolist())


def count_hot_rows(
    spec: EmbeddingSpec, batches: Iterable[Mapping[FeatureSpec, Bags]]
) -> dict[str, tuple[int, ...]]:
    """Finds the most frequent rows of tables whose `hot_rows` is a number.

    Args:
        spec: the configuration.
        batches: for each batch, the ids of each lookup.

    Returns:
        Ids by the table's name, the most frequent first; fewer if fewer ids
        were looked up.
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
