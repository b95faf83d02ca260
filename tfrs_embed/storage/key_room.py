"""How many keys a table has room for, and which ones are evicted first."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tfrs_embed.checkpoint.rows import FREQUENCY, LAST_USED
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.distribution import key_shards
from tfrs_embed.storage.key_rules import SPILLED, key_rules


def eviction_order(
    table: TableSpec,
    keys: np.ndarray,
    frequency: np.ndarray,
    last_used: np.ndarray,
) -> np.ndarray:
    """Returns the indices that sort keys, first to be evicted first, [n] int64.

    Keys, frequencies and steps of last use are [n] int64. A table without an
    eviction rule has the order of "lru".
    """
    by = [keys, last_used]
    if table.keys.eviction == "lfu":  # type: ignore[union-attr]
        by.append(frequency)
    return np.lexsort(by)


class KeyRoom:
    """For how many keys a table's shards have room; errors call it `owner`.

    Attributes:
        evicts: whether steps evict keys from the table.
    """

    def __init__(self, table: TableSpec, world: int, owner: str) -> None:
        rules = key_rules(table, world)
        self._table = table
        self._world = world
        self._owner = owner
        self._capacity = rules.max_capacity
        if table.keys.spill is not None:  # type: ignore[union-attr]
            self._capacity = SPILLED  # The file's errors name its limit.
        self.evicts = rules.evicts

    def shards_of(self, keys: np.ndarray) -> np.ndarray:
        """Returns keys' shards, [n] int64, as [n] int32."""
        mixed = self._table.keys.MIXED  # type: ignore[union-attr]
        return key_shards.shards_of(keys, self._world, mixed)

    def require(self, keys: np.ndarray) -> None:
        """Requires room for all keys, [n] int64.

        Raises:
            ValueError: a shard has no room for all of its keys.
        """
        shortage = self._shortage(self.shards_of(keys))
        if shortage:
            raise ValueError(
                f"{self._owner} has no room for {len(keys)} keys: {shortage}. "
                f"{self._table.keys.MORE_ROOM} "  # type: ignore[union-attr]
                "To restore a part of a checkpoint's keys, those that the "
                "table would evict last, use "
                "tfrs_embed.checkpoint.growing_tables(shrink=True)."
            )

    def choose(
        self, keys: np.ndarray, known: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Chooses the keys that find room, those evicted last: [n] bool.

        `known` has the keys' counters by name; a missing counter is zeros.
        """
        kept = np.ones(len(keys), bool)
        shard_of = self.shards_of(keys)
        if self._shortage(shard_of):
            zeros = np.zeros(len(keys), np.int64)
            order = eviction_order(
                self._table,
                keys,
                *(known.get(name, zeros) for name in (FREQUENCY, LAST_USED)),
            )
            for rank in range(self._world):
                mine = order[shard_of[order] == rank]
                kept[mine[: max(0, len(mine) - self._capacity)]] = False
        return kept

    def _shortage(self, shard_of: np.ndarray) -> str:
        """Names the fullest of the keys' shards if it lacks room; else ""."""
        sizes = np.bincount(shard_of, minlength=self._world)
        fullest = int(np.argmax(sizes))
        if sizes[fullest] <= self._capacity:
            return ""
        return (
            f"shard {fullest} of {self._world} would hold {sizes[fullest]} of "
            f"them, and has at most {self._capacity} rows"
        )

    def left_out(self, keys: np.ndarray, kept: np.ndarray, source: str) -> str:
        """Returns a warning of keys of a checkpoint that are not `kept`."""
        rule = self._table.keys.eviction  # type: ignore[union-attr]
        return (
            f"{self._owner} leaves out {np.sum(~kept)} of {len(keys)} keys of "
            f"'{source}': {self._shortage(self.shards_of(keys))}. "
            f"These are the keys that eviction={rule!r} evicts first. More "
            "rows make room for all keys."
        )
