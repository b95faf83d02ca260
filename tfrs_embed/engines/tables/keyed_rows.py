"""The rows of a table's shards, read and written by key.

A key's row depends on who asked for it when, and on the number of replicas;
none of that is of interest outside. Keys, what is known of them, rows and slots
are therefore read and written in the order of the keys.
"""

from __future__ import annotations

import dataclasses
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import growth
from tfrs_embed.checkpoint.bundle import BundleReader, blocks
from tfrs_embed.checkpoint.rows import (
    CANDIDATES,
    FREQUENCY,
    KEYS,
    LAST_USED,
    HeldRows,
    held_rows,
    key_of,
    sibling,
)
from tfrs_embed.checkpoint.session import Session
from tfrs_embed.configs import TableSpec
from tfrs_embed.distribution import waits
from tfrs_embed.distribution.key_shards import shards_of
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.dynamic_keys import KeysOfShards
from tfrs_embed.engines.tables.eviction_order import eviction_order
from tfrs_embed.engines.tables.key_rules import FIRST_ROW
from tfrs_embed.engines.tables.keyed_shard import KeyedShard
from tfrs_embed.engines.tables.sharded import BLOCK_ELEMENTS
from tfrs_embed.graphs import TracedOnce

#: What is known of keys that have rows, each [n] int64.
COUNTERS = (FREQUENCY, LAST_USED)
# Of these each shard has integers, of all others rows.
_INTEGERS = (KEYS, *COUNTERS, CANDIDATES)
# A full shard is warned of if more than this part of the table's rows is free.
_FREE_PART = 1 / 8


class KeyedRows:
    """The keys of this process's shards, what is known of them, and their rows.

    Its parts have names: "keys", "frequency", "last_used", "candidates",
    "parameters" and those of slots.

    Args:
        table: the table.
        shards: this process's shards of it.
        replicas: the replicas.
        step: the number of updates made, as the engine has it.
    """

    def __init__(
        self,
        table: TableSpec,
        shards: Sequence[KeyedShard],
        replicas: Replicas,
        step: Any,
    ) -> None:
        #: The names of parameters and slots.
        self.names = tuple(shards[0].variables)
        self.shards = tuple(shards)
        owner = f" of layer '{table.owner}'" if table.owner else ""
        self._owner = f"Table '{table.name}'{owner}"
        self._spec = table
        self._capacity = shards[0].rules.max_capacity
        self._evicts = shards[0].rules.evicts
        self._replicas = replicas
        self._step = step
        # Of the sizes, integers, rows, a number for each row, and candidates.
        self._channel = replicas.allocate(5)
        self._collect: dict[Any, TracedOnce] = {}
        self._said_full = False
        # The keys that were last written.
        self._written = np.zeros([0], np.int64)
        # More keys than there is room for, and the values written for them:
        # which keys stay is known when their counters are written.
        self._coming: dict[str, np.ndarray] = {}
        #: The checkpoint that new keys were last read from, and their number.
        self.source: str | None = None
        self.num_new_keys = 0
        # New keys in the checkpoint's order, what is known of them, and each
        # one's shard; -1: it is left out.
        self._new: dict[str, np.ndarray] = {}
        self._shard_of = np.zeros([0], np.int32)
        # The step at which the keys to restore were saved, if it is known. The
        # last use of those restored, until uses are counted from the step here;
        # None: they had no counters.
        self._saved_at: int | None = None
        self._newest: int | None = None
        self._newest_of_new: int | None = None
        self._has_step = False
        # What saves the table, and the moment that it saves.
        self._saving: tuple[Callable[[], Any], list[tuple[int, ...]]]
        self._saving = (lambda: None), []

    @property
    def workers(self) -> int:
        """The number of processes that have shards."""
        return self._replicas.workers

    def variables(self, name: str) -> list[tf.Variable]:
        """The shards' variables of a part, or beside it, for TensorFlow."""
        name = "parameters" if name in _INTEGERS else name
        return [shard.variables[name] for shard in self.shards]

    def row_shape(self, name: str) -> tuple[int, ...]:
        """The shape of what a part has for each key."""
        if name in _INTEGERS:
            return (3,) if name == CANDIDATES else ()
        return tuple(self.shards[0].variables[name].shape[1:])

    # How many there are.

    def counts(self, name: str = KEYS) -> list[int]:
        """The length of a part, of each shard; all workers must ask."""
        counts = self._sizes(name)
        if name != CANDIDATES:
            self._say_full(counts)
        return counts

    def _sizes(self, name: str) -> list[int]:
        if name == CANDIDATES:
            return self._numbers([len(s.candidates()) for s in self.shards])
        return self._numbers([s.key_table.size() for s in self.shards])

    def local_counts(self) -> dict[int, int]:
        """The number of keys of this process's shards, by their ranks."""
        sizes = [int(shard.key_table.size()) for shard in self.shards]
        return dict(zip(self._replicas.ranks, sizes, strict=True))

    def capacities(self) -> list[int]:
        """How many keys each shard has room for; all workers must ask."""
        return self._numbers([s.key_table.capacity() for s in self.shards])

    def _numbers(self, here: Sequence[Any]) -> list[int]:
        """A number of each shard, in the order of the ranks."""
        if self.workers == 1:
            return [int(number) for number in self._by_rank(here)]
        sent = [tf.cast(number, tf.int64)[None] for number in here]
        return self._gather(sent, self._channel).tolist()

    def _say_full(self, sizes: Sequence[int]) -> None:
        """Warns once of a shard that evicts while others have many free rows.

        Args:
            sizes: the number of keys of each shard.
        """
        free = [self._capacity - size for size in sizes]
        rows = self._capacity * len(sizes)
        if (
            self._said_full
            or not self._evicts
            or min(free) > 0
            or sum(free) <= _FREE_PART * rows
        ):
            return
        self._said_full = True
        self._warn(
            f"{self._owner}: shard {np.argmin(free)} holds {self._capacity} "
            f"keys and is full: it evicts keys, while the other shards have "
            f"{sum(free)} free rows of {rows - self._capacity}. A key's shard "
            "is that of its hash. Small tables are filled more evenly with "
            "more rows, or on fewer replicas."
        )

    def _warn(self, text: str) -> None:
        """Warns, on one of the workers."""
        if self._replicas.worker == 0:
            warnings.warn(text, UserWarning, stacklevel=2)

    # Reading.

    def read(self, name: str) -> np.ndarray:
        """A part of all shards, [n, ...], in the order of the keys.

        Raises:
            RuntimeError: another thread changed the keys meanwhile.
        """
        if name == KEYS:
            return np.sort(np.concatenate(self._all(KEYS)))
        if name == CANDIDATES:
            found = np.concatenate(self._all(CANDIDATES))
            return found[np.argsort(found[:, 0])]
        before = self._moment()
        found = np.concatenate(self._all(name))
        keys = np.concatenate(self._all(KEYS))
        self._require_moment(before, f"its {name} were read")
        return found[np.argsort(keys)]

    def held(self, name: str) -> list[HeldRows]:
        """The parameters or a slot of this process's shards; no collective."""
        found = []
        for shard in self.shards:
            live = shard.live()
            rows = held_rows(shard.variables[name], len(live.rows), live.rows)
            found.append(dataclasses.replace(rows, keys=live.keys))
        return found

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The rows of keys, [n] int64, on their shards; -1: none.

        With several workers all must ask for the same keys.
        """
        found = []
        shard_of = shards_of(keys, self._replicas.world)
        for rank, shard in zip(self._replicas.ranks, self.shards, strict=True):
            rows = shard.key_table.find(tf.constant(keys, tf.int64)).numpy()
            known = (shard_of == rank) & (rows >= FIRST_ROW)
            found.append(np.where(known, rows - FIRST_ROW, -1))
        return np.max(self._all_integers(found), 0)

    def statistics(self) -> np.ndarray:
        """The sums of all shards' statistics, [8] int64."""
        here = [shard.key_table.statistics() for shard in self.shards]
        return np.sum(self._all_integers(here), 0)

    def _all_integers(self, here: list[np.ndarray]) -> list[np.ndarray]:
        """Each shard's integers, [n] of one n, in the order of the ranks."""
        sizes = [len(here[0])] * self._replicas.world
        return self._in_blocks(
            lambda i, start, size: here[i][start : start + size],
            sizes,
            self._channel + 1,
        )

    def _all(self, name: str) -> list[np.ndarray]:
        """A part of each shard, by row, in the order of the ranks."""
        channel = self._channel + 1
        if name in _INTEGERS:
            values = self._integers(name)
            channel += 3 if name == CANDIDATES else 0
        else:
            rows = [shard.live().rows for shard in self.shards]
            channel += 1 if self.row_shape(name) else 2

        def block(i: int, start: int, size: int) -> np.ndarray:
            part = slice(start, start + size)
            if name in _INTEGERS:
                return values[i][part]
            return self._gather_rows(i, name, rows[i][part]).numpy()

        return self._in_blocks(block, self._sizes(name), channel)

    def _integers(self, name: str) -> list[np.ndarray]:
        """A part of this process's shards that isn't rows, each by row."""
        if name == CANDIDATES:
            return [shard.candidates() for shard in self.shards]
        return [getattr(shard.live(), name) for shard in self.shards]

    def _gather_rows(
        self, shard: int, name: str, rows: np.ndarray
    ) -> tf.Tensor:
        """Rows of a shard, [n, dim] or [n], in the host's memory."""
        variable = self.shards[shard].variables[name]
        # Reading the variable would copy all of it if it was updated sparsely.
        with tf.device(variable.device):
            block = tf.gather(variable, tf.constant(rows, tf.int64))
        with tf.device("CPU:0"):
            return tf.identity(block)

    def _by_rank(self, values: Sequence[Any]) -> list[Any]:
        """Orders shards' values by rank, where this process has all shards."""
        ranks = self._replicas.ranks
        return [values[ranks.index(rank)] for rank in range(len(ranks))]

    def _in_blocks(
        self,
        block: Callable[[int, int, int], np.ndarray],
        sizes: list[int],
        channel: int,
    ) -> list[np.ndarray]:
        """Gathers all shards' values, in the order of the ranks.

        Args:
            block: takes the place of a shard of this process, a start and a
                size, and returns so many of its values from there, or fewer.
            sizes: how many values each shard has.
            channel: the collective's.
        """
        local = range(len(self.shards))
        if self.workers == 1:
            return self._by_rank([block(i, 0, 1 << 62) for i in local])
        size = min(self._capacity, max(1, BLOCK_ELEMENTS // self._spec.dim))
        parts: list[list[np.ndarray]] = [[] for _ in sizes]
        # Once at least, for the shape of no rows.
        for start in range(0, max(1, *sizes), size):
            sent = []
            for i in local:
                values = block(i, start, size)
                padding = [(0, size - len(values))] + [(0, 0)] * (
                    values.ndim - 1
                )
                sent.append(tf.convert_to_tensor(np.pad(values, padding)))
            gathered = np.split(self._gather(sent, channel), len(sizes))
            for part, values in zip(parts, gathered, strict=True):
                part.append(values)
        return [
            np.concatenate(part)[:n]
            for part, n in zip(parts, sizes, strict=True)
        ]

    def _gather(self, values: list[tf.Tensor], channel: int) -> np.ndarray:
        """Gathers the local replicas' values, of one shape, from all."""
        if channel not in self._collect:

            def collect(*values: tf.Tensor) -> tf.Tensor:
                gathered = [
                    self._replicas.gather(i, value, channel)
                    for i, value in enumerate(values)
                ]
                return gathered[0]

            specs = [tf.TensorSpec.from_tensor(value) for value in values]
            self._collect[channel] = TracedOnce(collect, *specs)
        with waits.together(self._replicas, f"read the keys of {self._owner}"):
            return self._collect[channel](*values).numpy()

    def _moment(self) -> list[tuple[int, ...]]:
        """Numbers that change with the keys of this process's shards."""
        return [shard.key_table.moment() for shard in self.shards]

    def _require_moment(self, before: list[tuple[int, ...]], what: str) -> None:
        """Requires that the keys are still those of a moment.

        With several workers, which may not stop alone, nothing is required.

        Raises:
            RuntimeError: they have changed.
        """
        if self.workers == 1 and self._moment() != before:
            raise RuntimeError(
                f"{self._owner}: another thread gave rows to other keys while "
                f"{what}. Do it between steps, in the thread that trains."
            )

    # Writing.

    def write(self, name: str, values: np.ndarray) -> None:
        """Sets a part of all shards.

        Keys replace all that there are, and get initial rows and slots, and
        counters of zero. If the table evicts keys, those without room are left
        out: which, is decided again when counters are written for all of them.
        Candidates replace all candidates. Other parts are those of the keys
        that there are, or that were last written.

        Args:
            name: which part.
            values: [n, ...]; keys [n] int64, ascending.

        Raises:
            ValueError: another shape, or keys that are not ascending, or that a
                shard has no room for.
            RuntimeError: with several workers, keys came since they were
                written.
        """
        if name == CANDIDATES:
            candidates = _checked_candidates(values, self._owner)
            for rank, shard in self._by_ranks():
                shard.set_known(candidates=self._of_shard(candidates, rank))
            return
        coming, self._coming = self._coming, {}
        if name == KEYS:
            self._write_keys(values)
        elif KEYS not in coming or len(values) != len(coming[KEYS]):
            self._write(name, values)
        else:
            self._write(name, values[np.isin(coming[KEYS], self._written)])
            self._coming = {**coming, name: np.asarray(values)}
            if name == COUNTERS[-1]:
                self._choose_again()

    def _by_ranks(self) -> list[tuple[int, KeyedShard]]:
        """This process's shards, with their ranks."""
        return list(zip(self._replicas.ranks, self.shards, strict=True))

    def check_keys(self, keys: np.ndarray) -> None:
        """Checks keys that are to be written.

        Raises:
            ValueError: as `write` does.
        """
        if keys.dtype != np.int64 or keys.ndim != 1:
            raise ValueError(
                f"{self._owner}: keys must be int64 of shape [n], got "
                f"{keys.dtype} of shape {list(keys.shape)}."
            )
        if not np.all(keys[1:] > keys[:-1]):
            raise ValueError(
                f"{self._owner}: keys must be ascending, each of them once."
            )
        if not self._may_leave_out:
            self._require_room(keys)

    def _write_keys(self, keys: np.ndarray) -> None:
        self.check_keys(keys)
        zeros = np.zeros(len(keys), np.int64)
        known = {FREQUENCY: zeros, LAST_USED: zeros}
        kept = self._put(keys, known)
        if not kept.all():
            self._coming = {KEYS: keys}
            self._say_left_out(keys)

    def _put(
        self, keys: np.ndarray, known: Mapping[str, np.ndarray]
    ) -> np.ndarray:
        """Replaces all keys; returns which of them found room, [n] bool.

        Args:
            keys: [n] int64, ascending.
            known: their counters, by name.
        """
        shard_of = self._with_room(keys, known)
        self._written = keys[shard_of >= 0]
        for rank, shard in self._by_ranks():
            mine = shard_of == rank
            shard.replace(
                keys[mine],
                known[FREQUENCY][mine],
                known[LAST_USED][mine],
                np.zeros([0, 3], np.int64),
            )
        return shard_of >= 0

    def _choose_again(self) -> None:
        """Writes the keys that were left out anew, now by their counters."""
        coming, self._coming = self._coming, {}
        keys = coming.pop(KEYS)
        zeros = np.zeros(len(keys), np.int64)
        known = {name: coming.pop(name, zeros) for name in COUNTERS}
        kept = self._put(keys, known)
        for name, values in coming.items():
            self._write(name, values[kept])

    def _write(self, name: str, values: np.ndarray) -> None:
        """Sets a part of the keys that there are."""
        keys = self._keys_to_write_for()
        shape = (len(keys), *self.row_shape(name))
        if name in COUNTERS:
            values = _checked(values, len(keys), f"{self._owner}: {name}")
        elif values.shape != shape:
            raise ValueError(
                f"{self._owner} holds {len(keys)} keys: its {name} have the "
                f"shape {list(shape)}, and can't be given a value of shape "
                f"{list(values.shape)}."
            )
        shard_of = shards_of(keys, self._replicas.world)
        for rank, shard in self._by_ranks():
            mine = shard_of == rank
            live = shard.live()
            # By key here, by row there.
            ordered = values[mine][np.searchsorted(keys[mine], live.keys)]
            if name in COUNTERS:
                shard.set_known(**{name: ordered})
            else:
                shard.write(
                    name,
                    tf.constant(live.rows, tf.int64),
                    tf.constant(ordered, tf.float32),
                )

    def _keys_to_write_for(self) -> np.ndarray:
        if self.workers == 1:
            return self.read(KEYS)
        # A restoring worker can't ask the others, which may not be restoring.
        shard_of = shards_of(self._written, self._replicas.world)
        for rank, shard in self._by_ranks():
            if int(shard.key_table.size()) != np.sum(shard_of == rank):
                raise RuntimeError(
                    f"{self._owner} has been given keys since they were "
                    "written: write the keys before their rows."
                )
        return self._written

    def _of_shard(self, candidates: np.ndarray, rank: int) -> np.ndarray:
        """The candidates of a shard, as many as it remembers."""
        rules = self.shards[0].rules
        if not rules.threshold:
            return candidates[:0]
        mine = candidates[
            shards_of(candidates[:, 0], self._replicas.world) == rank
        ]
        # The last are those that were seen last.
        order = np.lexsort((mine[:, 0], mine[:, 2]))
        return mine[order[max(0, len(mine) - rules.candidates) :]]

    def remove(self, keys: np.ndarray, evicted: bool = False) -> int:
        """Takes keys' rows; returns how many of this process's had one.

        Args:
            keys: [n] int64, unique.
            evicted: whether they count as evicted.
        """
        shard_of = shards_of(keys, self._replicas.world)
        return sum(
            shard.remove(keys[shard_of == rank], evicted)
            for rank, shard in self._by_ranks()
        )

    # Room.

    @property
    def _may_leave_out(self) -> bool:
        """Whether keys without room are left out."""
        return self._evicts or growth.may_shrink()

    def _with_room(
        self,
        keys: np.ndarray,
        known: Mapping[str, np.ndarray],
        evict: bool = True,
    ) -> np.ndarray:
        """Finds which keys the shards have room for.

        Args:
            keys: [n] int64.
            known: their counters, by name.
            evict: whether the table's rule may leave keys out.

        Returns:
            The shards of keys, [n] int32, -1 for those without room: the keys
            that would be evicted last stay.

        Raises:
            ValueError: a shard has no room for all of its keys, and none may be
                left out.
        """
        if not (self._may_leave_out if evict else growth.may_shrink()):
            self._require_room(keys)
        shard_of = shards_of(keys, self._replicas.world)
        if not self._shortage(shard_of):
            return shard_of
        order = eviction_order(
            self._spec, keys, known[FREQUENCY], known[LAST_USED]
        )
        for rank in range(self._replicas.world):
            mine = order[shard_of[order] == rank]
            shard_of[mine[: max(0, len(mine) - self._capacity)]] = -1
        return shard_of

    def _require_room(self, keys: np.ndarray) -> None:
        """Requires room for keys, [n] int64, in all shards.

        Raises:
            ValueError: a shard has none.
        """
        shortage = self._shortage(shards_of(keys, self._replicas.world))
        if shortage:
            more = "More rows make it"
            if isinstance(self._spec.keys, KeysOfShards):
                more = f"A larger {KeysOfShards.ROWS} makes it"
            raise ValueError(
                f"{self._owner} has no room for {len(keys)} keys: {shortage}. "
                f"{more}, or, for a checkpoint, tfrs_embed.checkpoint."
                "growing_tables(shrink=True): the keys that the table would "
                "evict last then stay."
            )

    def _shortage(self, shard_of: np.ndarray) -> str:
        """Says which shard has no room for its keys; "": all have.

        Args:
            shard_of: the keys' shards, [n] int32.
        """
        world = self._replicas.world
        sizes = np.bincount(shard_of, minlength=world)
        fullest = int(np.argmax(sizes))
        if sizes[fullest] <= self._capacity:
            return ""
        limit = "the most rows of a shard"
        if isinstance(self._spec.keys, KeysOfShards):
            limit = KeysOfShards.ROWS
        replicas = "1 replica" if world == 1 else f"{world} replicas"
        return (
            f"over {replicas} shard {fullest} would hold {sizes[fullest]} of "
            f"them, and {limit} is {self._capacity}"
        )

    def _say_left_out(self, keys: np.ndarray, source: str = "") -> None:
        """Warns that some keys have no room, unless they were allowed to go.

        Args:
            keys: all keys, [n] int64.
            source: says where they come from.
        """
        if growth.may_shrink():
            return
        shard_of = shards_of(keys, self._replicas.world)
        sizes = np.bincount(shard_of, minlength=self._replicas.world)
        lost = np.sum(np.maximum(sizes - self._capacity, 0))
        rule = self._spec.keys.eviction  # type: ignore[union-attr]
        self._warn(
            f"{self._owner} leaves out {lost} of {len(keys)} keys{source}: "
            f"{self._shortage(shard_of)}. Those go that eviction={rule!r} "
            "evicts first. With more rows all keys stay."
        )

    # Checkpoints.

    def save(self, name: str, key: str, session: Session) -> None:
        """Writes a part, shard after shard.

        With several workers all must, and each writes what it holds.

        Args:
            name: which part.
            key: the checkpoint's key.
            session: where to.

        Raises:
            RuntimeError: another thread changed the keys since the session
                began to save the table.
        """
        saving, before = self._saving
        if saving() is not session:
            before = self._moment()
            self._saving = weakref.ref(session), before
        writer, sizes = session.writer(self._replicas), self.counts(name)
        row = self.row_shape(name)
        shape = [sum(sizes), *row]
        integers = self._integers(name) if name in _INTEGERS else None
        if shape[0] == 0:
            if self._replicas.worker == 0:
                dtype = tf.float32 if integers is None else tf.int64
                writer.add(key, tf.zeros(shape, dtype))
            return
        for i, (rank, shard) in enumerate(self._by_ranks()):
            first = sum(sizes[:rank])
            if integers is not None:
                writer.add_blocks(
                    key, tf.constant(integers[i]), shape[0], first
                )
                continue
            rows = shard.live().rows
            for start, size in blocks([sizes[rank], *row], tf.float32):
                block = self._gather_rows(i, name, rows[start : start + size])
                writer.add_rows(key, shape, first + start, block)
        self._require_moment(before, "it was saved")

    def read_new_keys(self, key: str, reader: BundleReader) -> None:
        """Reads the keys that `restore_keys` is to put in the place of all.

        Counters and candidates are read with them.

        Args:
            key: the checkpoint's key.
            reader: the checkpoint.

        Raises:
            ValueError: they are no keys, or a shard has no room for its own.
        """
        keys = _read(key, reader)
        where = f"{self._owner}: '{reader.prefix}'"
        if keys.ndim != 1 or keys.dtype != np.int64:
            raise ValueError(
                f"{where} has keys of {keys.dtype} and shape "
                f"{list(keys.shape)}, not int64 of shape [n]."
            )
        if len(np.unique(keys)) != len(keys):
            raise ValueError(f"{where}: its keys must all differ.")
        known = {}
        for name in COUNTERS:
            there = sibling(key, name)
            if there in reader.shapes:
                known[name] = _checked(
                    _read(there, reader), len(keys), f"{where}: its {name}"
                )
        candidates = sibling(key, CANDIDATES)
        if candidates in reader.shapes:
            known[CANDIDATES] = _checked_candidates(
                _read(candidates, reader), where
            )
        self._set_new(keys, known, reader.prefix)
        self._saved_at = _step_of(key, reader)

    def read_new_numbers(self, rows: int, prefix: str) -> None:
        """Makes keys of the numbers of a table's rows; see `read_new_keys`."""
        self._set_new(np.arange(rows, dtype=np.int64), {}, prefix)

    def _set_new(
        self, keys: np.ndarray, known: dict[str, np.ndarray], prefix: str
    ) -> None:
        zeros = np.zeros(len(keys), np.int64)
        none = np.zeros([0, 3], np.int64)
        new = {FREQUENCY: zeros, LAST_USED: zeros, CANDIDATES: none, **known}
        uses = LAST_USED in known
        self._shard_of = self._with_room(keys, new, uses)
        seen = np.concatenate([new[LAST_USED], new[CANDIDATES][:, 2]])
        self._newest_of_new = int(seen.max()) if uses and seen.size else None
        self.source, self.num_new_keys = prefix, len(keys)
        self._new = {KEYS: keys, **new}

    @property
    def has_new_keys(self) -> bool:
        """Whether new keys were read that are not restored yet."""
        return bool(self._new)

    def restore_keys(self) -> None:
        """Replaces all keys by the new ones that were read.

        Their rows and slots are initial ones.
        """
        new, self._new = self._new, {}
        keys = new[KEYS]
        for rank, shard in self._by_ranks():
            mine = self._shard_of == rank
            shard.replace(
                keys[mine],
                new[FREQUENCY][mine],
                new[LAST_USED][mine],
                self._of_shard(new[CANDIDATES], rank),
            )
        if np.any(self._shard_of < 0):
            self._say_left_out(keys, f" of '{self.source}'")
        self._newest = self._newest_of_new
        if self._has_step:
            self.count_from_step()

    def restore(self, name: str, key: str, reader: BundleReader) -> None:
        """Reads the parameters or a slot of the keys last restored.

        Args:
            name: which of them.
            key: the checkpoint's key.
            reader: the checkpoint.
        """
        counts = [0] * len(self.shards)
        numbers = [shard.live().rows for shard in self.shards]
        for start, size in blocks(reader.shapes[key], tf.float32):
            rows = reader.read_rows(key, start, size)
            shard_of = self._shard_of[start : start + size]
            for i, (rank, shard) in enumerate(self._by_ranks()):
                # A shard's keys have its rows in the order they are read in.
                mine = tf.gather(rows, np.flatnonzero(shard_of == rank))
                end = counts[i] + mine.shape[0]
                there = tf.constant(numbers[i][counts[i] : end], tf.int64)
                shard.write(name, there, mine)
                counts[i] = end

    def count_from_step(self) -> None:
        """Moves restored uses by as many steps as this layer's are behind.

        A table that is restored without its layer keeps the step of the layer
        that it comes to. Its keys then have been used as many steps ago as
        where they were saved. To be called when the step has been restored, if
        it is to be; what is restored later comes after the step.
        """
        self._has_step = True
        newest, self._newest = self._newest, None
        if newest is None:
            return
        step = int(np.asarray(self._step))
        known = step if self._saved_at is None else self._saved_at
        # Where no step was saved, no use can be later than this layer's.
        later = step - max(newest, known)
        if later:
            for shard in self.shards:
                shard.set_known(
                    last_used=shard.live().last_used + later,
                    candidates=shard.candidates() + np.array([0, 0, later]),
                )


def _step_of(key: str, reader: BundleReader) -> int | None:
    """The step of the layer that a table's keys were saved with, if any was.

    A layer has its tables as "tables/<name>", or one as "table".
    """
    table = key.removesuffix(key_of("")).split("/")[:-1]
    if table[-2:-1] == ["tables"]:
        layer = table[:-2]
    elif table[-1:] == ["table"]:
        layer = table[:-1]
    else:
        return None
    step = key_of("/".join([*layer, "step"]))
    if reader.shapes.get(step) != []:
        return None
    return int(reader.read(step).numpy())


def _read(key: str, reader: BundleReader) -> np.ndarray:
    """A small tensor of a checkpoint."""
    shape, dtype = reader.shapes[key], reader.dtypes[key]
    if shape[0] == 0:
        return np.zeros(shape, dtype.as_numpy_dtype)
    parts = [reader.read_rows(key, *b).numpy() for b in blocks(shape, dtype)]
    return np.concatenate(parts)


def _checked(values: np.ndarray, size: int, what: str) -> np.ndarray:
    """Counters as [size] int64.

    Raises:
        ValueError: they are of another length or kind.
    """
    values = np.asarray(values)
    if values.shape != (size,) or values.dtype.kind not in "iu":
        raise ValueError(
            f"{what} must be integers of shape {[size]}, one for each key, got "
            f"{values.dtype} of shape {list(values.shape)}."
        )
    return values.astype(np.int64)


def _checked_candidates(values: np.ndarray, what: str) -> np.ndarray:
    """Candidates as [c, 3] int64.

    Raises:
        ValueError: they are of another shape or kind, or have a key twice.
    """
    values = np.asarray(values)
    if (
        values.ndim != 2
        or values.shape[1] != 3
        or values.dtype.kind not in "iu"
    ):
        raise ValueError(
            f"{what}: candidates must be integers of shape [c, 3], got "
            f"{values.dtype} of shape {list(values.shape)}."
        )
    if len(np.unique(values[:, 0])) != len(values):
        raise ValueError(f"{what}: candidates must all differ.")
    return values.astype(np.int64)
