"""The keys of a table on all shards, and where their rows are.

The row of a key depends on the order of requests and on the number of replicas.
Users and checkpoints therefore see keys, counters, rows and slots sorted by
key.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.rows import (
    CANDIDATES,
    FREQUENCY,
    LAST_USED,
)
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.storage.gathering import Gathering
from tfrs_embed.storage.key_room import KeyRoom
from tfrs_embed.storage.key_rules import ABSENT, FIRST_ROW
from tfrs_embed.storage.keyed_shard import KeyedShard

#: The counters of keys with rows, each [n] int64.
COUNTERS = (FREQUENCY, LAST_USED)


class TableKeys:
    """A table's keys, counters and rows, of this process's shards.

    `names` are "parameters" and the slots' names. A `KeyedVariable` reads and
    writes each part. Errors name the table as `owner`.
    """

    def __init__(
        self,
        table: TableSpec,
        shards: Sequence[KeyedShard],
        replicas: Replicas,
    ) -> None:
        self.names = tuple(shards[0].variables)
        self.shards = tuple(shards)
        layer = f" of layer '{table.owner}'" if table.owner else ""
        self.owner = f"Table '{table.name}'{layer}"
        self.room = KeyRoom(table, replicas.world, self.owner)
        self.replicas = replicas
        self.gather = Gathering(replicas, f"read the keys of {self.owner}")
        # With several workers: the keys with rows that were last written, and
        # the moment afterwards.
        self._written = np.zeros([0], np.int64)
        self._written_at: list[tuple[int, ...]] = []

    def by_ranks(self) -> list[tuple[int, KeyedShard]]:
        """Returns this process's shards, with their ranks."""
        return list(zip(self.replicas.ranks, self.shards, strict=True))

    def local_counts(self) -> dict[int, int]:
        """Returns the number of keys of this process's shards, by rank."""
        return {r: s.key_table.numbers().size for r, s in self.by_ranks()}

    def numbers(self, name: str) -> list[int]:
        """Returns each shard's number of `KeyNumbers`; all workers call it."""
        here = [getattr(s.key_table.numbers(), name) for s in self.shards]
        return self.gather.numbers(here)

    def have_rows(self, keys: np.ndarray) -> np.ndarray:
        """Returns whether keys have rows in this process, [n] bool."""
        found = np.zeros(len(keys), bool)
        for _, places, _ in self.located(keys):
            found[places] = True
        return found

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the keys' rows on their shards, [n] int64; -1: none.

        All workers must call with the same keys.
        """
        found = []
        for _, places, rows in self.located(keys):
            here = np.full(len(keys), -1)
            here[places] = rows - FIRST_ROW
            found.append(here)
        return np.max(self.gather(found), 0)

    def statistics(self) -> list[np.ndarray]:
        """Returns `last`, `total` and `spill` of shards' `KeyNumbers`, [12].

        The shards are those of this process.
        """
        numbers = [shard.key_table.numbers() for shard in self.shards]
        return [np.array([*n.last, *n.total, *n.spill]) for n in numbers]

    def moment(self) -> list[tuple[int, ...]]:
        """Returns numbers that change with this process's keys."""
        return [shard.moment() for shard in self.shards]

    def require_moment(self, before: list[tuple[int, ...]], what: str) -> None:
        """Requires that the keys have not changed, if there is one worker.

        One of several workers may not stop alone.

        Raises:
            RuntimeError: the keys have changed.
        """
        if self.replicas.workers == 1 and self.moment() != before:
            raise RuntimeError(
                f"{self.owner}: another thread gave rows to other keys while "
                f"{what}. Do it between steps, in the thread that trains."
            )

    def check_keys(self, keys: np.ndarray) -> None:
        """Checks keys before they replace all keys.

        Raises:
            ValueError: they aren't int64, [n] ascending, or a shard has no room
                for them.
        """
        if keys.dtype != np.int64 or keys.ndim != 1:
            raise ValueError(
                f"{self.owner}: keys must be int64 of shape [n], got "
                f"{keys.dtype} of shape {list(keys.shape)}."
            )
        if not np.all(keys[1:] > keys[:-1]):
            raise ValueError(
                f"{self.owner}: keys must be ascending, each of them once."
            )
        self.room.require(keys)

    def replace(
        self, keys: np.ndarray, known: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Replaces all keys, [n] int64; returns which found room, [n] bool.

        `known` has counters and candidates by name. Missing counters are zeros.
        """
        kept = self.room.choose(keys, known)
        zeros = np.zeros(len(keys), np.int64)
        frequency, last_used = (known.get(name, zeros) for name in COUNTERS)
        candidates = known.get(CANDIDATES, np.zeros([0, 3], np.int64))
        shard_of = np.where(kept, self.room.shards_of(keys), -1)
        shard_of_candidate = self.room.shards_of(candidates[:, 0])
        for rank, shard in self.by_ranks():
            mine = shard_of == rank
            shard.replace(
                keys[mine],
                frequency[mine],
                last_used[mine],
                candidates[shard_of_candidate == rank],
            )
        if self.replicas.workers > 1:
            self._written, self._written_at = np.sort(keys[kept]), self.moment()
        return kept

    def keys_to_write_for(self) -> np.ndarray:
        """Returns the keys to which written rows belong, ascending.

        Raises:
            RuntimeError: with several workers, keys came after the last write
                of keys.
        """
        if self.replicas.workers == 1:
            return np.sort(np.concatenate([s.live().keys for s in self.shards]))
        # Not a collective: the other workers may not be restoring.
        if self.moment() != self._written_at:
            raise RuntimeError(
                f"{self.owner} has been given keys since they were "
                "written: write the keys before their rows."
            )
        return self._written

    def write_for(self, name: str, keys: np.ndarray, values: Any) -> None:
        """Sets a part, [n, ...], of unique keys; skips keys without a row."""
        for shard, places, rows in self.located(keys):
            if name in COUNTERS:
                live = shard.live()
                known = getattr(live, name)
                known[np.searchsorted(live.rows, rows)] = values[places]
                shard.set_known(**{name: known})
                continue
            mine = values
            if len(places) < len(keys):
                mine = tf.gather(values, places)
            shard.write_some(name, rows, tf.cast(mine, tf.float32))

    def located(
        self, keys: np.ndarray
    ) -> Iterator[tuple[KeyedShard, np.ndarray, np.ndarray]]:
        """Yields each shard, the indices of keys with rows there, the rows."""
        shard_of = self.room.shards_of(keys)
        for rank, shard in self.by_ranks():
            places = np.flatnonzero(shard_of == rank)
            rows = shard.find(keys[places])
            found = rows != ABSENT
            yield shard, places[found], rows[found]

    def remove(self, keys: np.ndarray, evicted: bool = False) -> int:
        """Removes unique keys; returns how many had rows in this process.

        If `evicted`, they count as evicted.
        """
        shard_of = self.room.shards_of(keys)
        rows = [
            shard.key_table.remove(keys[shard_of == rank], evicted)
            for rank, shard in self.by_ranks()
        ]
        return int(np.sum(np.concatenate(rows) != ABSENT))


def checked_integers(
    name: str, values: np.ndarray, keys: int, what: str
) -> np.ndarray:
    """Returns counters as [keys] int64, or candidates as [c, 3] int64.

    Errors name the table as `what`.

    Raises:
        ValueError: the shape or dtype is wrong, or two candidates have one key.
    """
    values = np.asarray(values)
    wanted: list[int | None] = [keys]
    text = f"[{keys}], one for each key"
    if name == CANDIDATES:
        wanted, text = [None, 3], "[c, 3]"
    fits = tf.TensorShape(wanted).is_compatible_with(values.shape)
    if not fits or values.dtype.kind not in "iu":
        raise ValueError(
            f"{what}: {name} must be integers of shape {text}, got "
            f"{values.dtype} of shape {list(values.shape)}."
        )
    if name == CANDIDATES and len(np.unique(values[:, 0])) != len(values):
        raise ValueError(f"{what}: candidates must all differ.")
    return values.astype(np.int64)
