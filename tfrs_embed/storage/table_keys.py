"""All shards' rows of a table with keys, read and written in key order.

The row of a key depends on the order of requests and on the number of replicas.
Users and checkpoints therefore see keys, counters, rows and slots sorted by
key.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.rows import (
    CANDIDATES,
    FREQUENCY,
    KEYS,
    LAST_USED,
    HeldRows,
)
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.storage.gathering import Gathering
from tfrs_embed.storage.key_room import KeyRoom
from tfrs_embed.storage.key_rules import ABSENT, FIRST_ROW
from tfrs_embed.storage.keyed_shard import KeyedShard

#: The counters of keys with rows, each [n] int64.
COUNTERS = (FREQUENCY, LAST_USED)
#: The parts that are integers; the others are rows.
INTEGERS = (KEYS, *COUNTERS, CANDIDATES)


class TableKeys:
    """A table's keys, counters and rows, of this process's shards.

    Its parts have names: "keys", "frequency", "last_used", "candidates",
    "parameters" and the slots' names. `names` are "parameters" and the slots.
    Errors name the table as `owner`.
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

    def row_shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a part's values for one key."""
        if name in INTEGERS:
            return (3,) if name == CANDIDATES else ()
        return tuple(self.shards[0].variables[name].shape[1:])

    def by_ranks(self) -> list[tuple[int, KeyedShard]]:
        """Returns this process's shards, with their ranks."""
        return list(zip(self.replicas.ranks, self.shards, strict=True))

    # Reading.

    def local_counts(self) -> dict[int, int]:
        """Returns the number of keys of this process's shards, by rank."""
        return {r: s.key_table.numbers().size for r, s in self.by_ranks()}

    def numbers(self, name: str) -> list[int]:
        """Returns each shard's number of `KeyNumbers`; all workers call it."""
        here = [getattr(s.key_table.numbers(), name) for s in self.shards]
        return self.gather.numbers(here)

    def read(self, name: str) -> np.ndarray:
        """Returns a part of all shards, [n, ...], sorted by key.

        Raises:
            RuntimeError: another thread changed the keys meanwhile.
        """
        if name == KEYS:
            return np.sort(self._all(KEYS))
        before = self.moment()
        found = self._all(name)
        if name == CANDIDATES:
            return found[np.argsort(found[:, 0])]
        keys = self._all(KEYS)
        self.require_moment(before, f"its {name} were read")
        return found[np.argsort(keys)]

    def _all(self, name: str) -> np.ndarray:
        """Returns a part of all shards, shard after shard, by row in each."""
        here = []
        for shard in self.shards:
            if name in INTEGERS:
                here.append(shard.integers(name))
            else:
                here.append(shard.gather(name, shard.live().rows).numpy())
        return np.concatenate(self.gather(here))

    def held(self, name: str) -> list[HeldRows]:
        """Returns a part's rows in this process's shards; no collective."""
        row = 4 * math.prod(self.row_shape(name))
        found = []
        for shard in self.shards:
            keys, rows, *_ = shard.live()

            def gather(
                wanted: np.ndarray,
                shard: KeyedShard = shard,
                rows: np.ndarray = rows,
            ) -> tf.Tensor:
                return shard.gather(name, rows[wanted])

            found.append(HeldRows(len(keys), row * len(keys), gather, keys))
        return found

    def collect(self, name: str, keys: np.ndarray) -> np.ndarray:
        """Returns rows, [n, ...], of keys that have rows.

        All workers must call with the same keys.
        """
        here = [
            shard.gather(name, rows).numpy()
            for shard, _, rows in self._located(keys)
        ]
        order = np.argsort(self.room.shards_of(keys), kind="stable")
        found = np.empty((len(keys), *self.row_shape(name)), np.float32)
        found[order] = np.concatenate(self.gather(here))
        return found

    def have_rows(self, keys: np.ndarray) -> np.ndarray:
        """Returns whether keys have rows in this process, [n] bool."""
        found = np.zeros(len(keys), bool)
        for _, places, _ in self._located(keys):
            found[places] = True
        return found

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns the keys' rows on their shards, [n] int64; -1: none.

        All workers must call with the same keys.
        """
        found = []
        for _, places, rows in self._located(keys):
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

    # Writing.

    def write(self, name: str, values: np.ndarray) -> None:
        """Sets a part of all shards.

        Keys, [n] int64 ascending, replace all keys, and get initial rows,
        initial slots and counters of zero. Candidates replace all candidates.
        Other parts, [n, ...], belong to the keys that exist.

        Raises:
            ValueError: the shape is wrong, keys are not ascending, or a shard
                has no room for them.
            RuntimeError: with several workers, keys came after the last write
                of keys.
        """
        if name == CANDIDATES:
            candidates = checked_integers(name, values, 0, self.owner)
            shard_of = self.room.shards_of(candidates[:, 0])
            for rank, shard in self.by_ranks():
                shard.set_known(candidates=candidates[shard_of == rank])
        elif name == KEYS:
            self.check_keys(values)
            self.replace(values, {})
        else:
            keys = self._keys_to_write_for()
            if name in COUNTERS:
                values = checked_integers(name, values, len(keys), self.owner)
            shape = (len(keys), *self.row_shape(name))
            if values.shape != shape:
                raise ValueError(
                    f"{self.owner} holds {len(keys)} keys: its {name} have the "
                    f"shape {list(shape)}, and can't be given a value of shape "
                    f"{list(values.shape)}."
                )
            self.write_for(name, keys, values)

    def check_keys(self, keys: np.ndarray) -> None:
        """Checks keys before they are written; see `write`."""
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

    def _keys_to_write_for(self) -> np.ndarray:
        """Returns the keys to which written rows belong."""
        if self.replicas.workers == 1:
            return self.read(KEYS)
        # Not a collective: the other workers may not be restoring.
        if self.moment() != self._written_at:
            raise RuntimeError(
                f"{self.owner} has been given keys since they were "
                "written: write the keys before their rows."
            )
        return self._written

    def write_for(self, name: str, keys: np.ndarray, values: Any) -> None:
        """Sets a part, [n, ...], of unique keys; skips keys without a row."""
        for shard, places, rows in self._located(keys):
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

    def _located(
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
