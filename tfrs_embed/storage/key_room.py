"""How many keys a table has room for, and which ones are evicted first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tfrs_embed.checkpoint import growth
from tfrs_embed.checkpoint.rows import FREQUENCY, LAST_USED
from tfrs_embed.configs.dynamic_keys import KeysOfShards, TimeToLive
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.distribution.key_shards import shards_of
from tfrs_embed.storage.key_rules import key_rules

# A full shard is reported if more than this part of all rows is free.
_FREE_PART = 1 / 8


def eviction_order(
    table: TableSpec,
    keys: np.ndarray,
    frequency: np.ndarray,
    last_used: np.ndarray,
) -> np.ndarray:
    """Returns the indices that sort keys, first to be evicted first, [n] int64.

    Keys, frequencies and steps of last use are [n] int64. A table without an
    eviction rule has the order of "lru".

    Raises:
        ValueError: the rule is a function that did not return a number per key.
    """
    rule = table.keys.eviction  # type: ignore[union-attr]
    if rule is None or rule == "lru" or isinstance(rule, TimeToLive):
        return np.lexsort((keys, last_used))
    if rule == "lfu":
        return np.lexsort((keys, last_used, frequency))
    where = f"Table '{table.name}': its eviction rule returned"
    scores = np.asarray(rule(keys, last_used, frequency))  # type: ignore[operator]
    if scores.shape != keys.shape or scores.dtype.kind not in "iufb":
        raise ValueError(
            f"{where} {scores.dtype} of shape {list(scores.shape)}, not a "
            f"number for each of {len(keys)} keys."
        )
    if np.isnan(scores).any():
        raise ValueError(f"{where} NaN for key {keys[np.isnan(scores)][0]}.")
    return np.lexsort((keys, scores))


class KeyRoom:
    """For how many keys a table's shards have room; errors call it `owner`."""

    def __init__(self, table: TableSpec, world: int, owner: str) -> None:
        rules = key_rules(table, world)
        self._table = table
        self._world = world
        self._owner = owner
        self._capacity = rules.max_capacity
        self._evicts = rules.evicts

    def require(self, keys: np.ndarray, evict: bool = True) -> None:
        """Requires room for all keys, [n] int64.

        If `evict`, the table's eviction rule may leave keys out instead.

        Raises:
            ValueError: a shard has no room for all of its keys.
        """
        if (evict and self._evicts) or growth.may_shrink():
            return
        shortage = self._shortage(shards_of(keys, self._world))
        if shortage:
            more = "More rows make"
            if isinstance(self._table.keys, KeysOfShards):
                more = f"A larger {KeysOfShards.ROWS} makes"
            raise ValueError(
                f"{self._owner} has no room for {len(keys)} keys: {shortage}. "
                f"{more} room. To restore a part of a checkpoint's keys, those "
                "that the table would evict last, use "
                "tfrs_embed.checkpoint.growing_tables(shrink=True)."
            )

    def choose(
        self, keys: np.ndarray, known: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Chooses the keys that find room, those evicted last: [n] bool.

        `known` has the keys' counters by name; a missing counter is zeros.
        """
        kept = np.ones(len(keys), bool)
        shard_of = shards_of(keys, self._world)
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
        limit = "the most rows of a shard"
        if isinstance(self._table.keys, KeysOfShards):
            limit = KeysOfShards.ROWS
        replicas = (
            "1 replica" if self._world == 1 else f"{self._world} replicas"
        )
        return (
            f"over {replicas} shard {fullest} would hold {sizes[fullest]} of "
            f"them, and {limit} is {self._capacity}"
        )

    def left_out(self, keys: np.ndarray, kept: np.ndarray, source: str) -> str:
        """Returns a warning of keys that are not `kept`; "" if none is due."""
        if kept.all() or growth.may_shrink():
            return ""
        rule = self._table.keys.eviction  # type: ignore[union-attr]
        return (
            f"{self._owner} leaves out {np.sum(~kept)} of {len(keys)} keys"
            f"{source}: {self._shortage(shards_of(keys, self._world))}. These "
            f"are the keys that eviction={rule!r} evicts first. More rows make "
            "room for all keys."
        )

    def unevenly_full(self, sizes: Sequence[int]) -> str:
        """Returns a warning of one full shard beside free ones, or ""."""
        free = [self._capacity - size for size in sizes]
        rows = self._capacity * len(sizes)
        if not self._evicts or min(free) > 0 or sum(free) <= _FREE_PART * rows:
            return ""
        return (
            f"{self._owner}: shard {np.argmin(free)} holds {self._capacity} "
            f"keys and is full: it evicts keys, while the other shards have "
            f"{sum(free)} free rows of {rows - self._capacity}. A hash decides "
            "a key's shard. Small tables fill more evenly with more rows, or "
            "on fewer replicas."
        )
