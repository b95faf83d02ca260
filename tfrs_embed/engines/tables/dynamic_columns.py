"""What a checkpoint holds of a table whose keys come and go.

Besides the keys, their rows and slots these are counters of the keys, and the
candidates: keys without rows, with theirs.
"""

from __future__ import annotations

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
    key_of,
    sibling,
)
from tfrs_embed.checkpoint.session import Session
from tfrs_embed.configs import TableSpec
from tfrs_embed.distribution.key_shards import shards_of
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.dynamic_keys import KeysOfShards, TimeToLive
from tfrs_embed.engines.tables.column import Column
from tfrs_embed.engines.tables.dynamic_rows import DynamicRows
from tfrs_embed.engines.tables.keyed_rows import KeyedRows

COUNTERS = (FREQUENCY, LAST_USED)
# A full shard is warned of if more than this part of the table's rows is free.
_FREE_PART = 1 / 8


class DynamicKeyedRows(KeyedRows):
    """The keys of this process's shards, their rows, slots and counters.

    Args:
        table: the table.
        shards: this process's shards of it.
        replicas: the replicas.
        step: the number of updates made, as the engine has it.
    """

    has_counters = True

    def __init__(
        self,
        table: TableSpec,
        shards: Sequence[DynamicRows],
        replicas: Replicas,
        step: Any,
    ) -> None:
        limit, more = "the most rows of a shard", "More rows make it"
        if isinstance(table.keys, KeysOfShards):
            limit = KeysOfShards.ROWS
            more = f"A larger {limit} makes it"
        owner = f" of layer '{table.owner}'" if table.owner else ""
        super().__init__(
            f"Table '{table.name}'{owner}",
            shards[0].rules.max_capacity,
            limit,
            f"{more}, or, for a checkpoint, "
            "tfrs_embed.checkpoint.growing_tables(shrink=True): the keys that "
            "the table would evict last then stay.",
            table.dim,
            shards,
            [shard.variables for shard in shards],
            replicas,
            lambda: None,  # Keys that get rows get initial ones.
        )
        self.shards = tuple(shards)
        self._spec = table
        self._evicts = shards[0].rules.evicts
        self._step = step
        self._new: dict[str, np.ndarray] = {}
        self._has_uses = False
        # More keys than there is room for, and the values written for them:
        # which keys stay is known when their counters are written.
        self._coming: dict[str, np.ndarray] = {}
        self._said_full = False
        # The step at which the keys to restore were saved, if it is known. The
        # last use of those restored, until uses are counted from the step here;
        # None: they had no counters.
        self._saved_at: int | None = None
        self._newest: int | None = None
        self._has_step = False
        # What saves the table, and the moment that it saves.
        self._saving: tuple[Callable[[], Any], list[tuple[int, ...]]]
        self._saving = (lambda: None), []

    def read(self, name: str) -> np.ndarray:
        """See the base class; counters are [n] int64.

        Raises:
            RuntimeError: another thread changed the keys meanwhile.
        """
        before = self._moment()
        if name not in COUNTERS:
            values = super().read(name)
        else:
            order = np.argsort(np.concatenate(self._all_keys()))
            values = np.concatenate(self._all_counters(name))[order]
        self._require_moment(before, f"its {name} were read")
        return values

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

    def _all_counters(self, name: str) -> list[np.ndarray]:
        """Each shard's counters by row, in the order of the ranks."""
        values = [shard.counters(name) for shard in self.shards]
        if self.workers == 1:
            return self._by_rank(values)
        return self._numbers_in_blocks(values, self.key_counts())

    def _numbers_in_blocks(
        self, values: Sequence[np.ndarray], sizes: list[int]
    ) -> list[np.ndarray]:
        """Gathers all shards' numbers, [n] int64 each."""

        def block(start: int, size: int) -> list[np.ndarray]:
            parts = [v[start : start + size] for v in values]
            return [np.pad(p, (0, size - len(p))) for p in parts]

        return self._in_blocks(block, self._channel + 1, sizes)

    def key_counts(self) -> list[int]:
        """See the base class; says once that shards are filled unevenly."""
        sizes = super().key_counts()
        self._say_full(sizes)
        return sizes

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

    def write_keys(self, keys: np.ndarray) -> None:
        """See the base class.

        If the table evicts keys, those without room are left out: which, is
        decided again when counters are written for all of these keys.
        """
        self._coming = {}
        self.check_keys(keys)
        zeros = np.zeros(len(keys), np.int64)
        kept = self._with_room(keys, {FREQUENCY: zeros, LAST_USED: zeros}) >= 0
        super().write_keys(keys[kept])
        if not kept.all():
            self._coming = {KEYS: keys}
            self._say_left_out(keys)

    @property
    def _may_leave_out(self) -> bool:
        return self._evicts or growth.may_shrink()

    def write(self, name: str, values: np.ndarray) -> None:
        """See the base class; counters are [n] int64.

        Values of all keys that were last written are taken, too.
        """
        keys = self._coming.get(KEYS)
        if keys is None or np.shape(values)[:1] != keys.shape:
            self._coming = {}
            self._write(name, values)
            return
        self._write(name, values[np.isin(keys, self._written)])
        self._coming[name] = np.asarray(values)
        if name == COUNTERS[-1]:
            self._choose_again()

    def _choose_again(self) -> None:
        """Writes the keys that were left out anew, now by their counters."""
        coming, self._coming = self._coming, {}
        keys = coming.pop(KEYS)
        zeros = np.zeros(len(keys), np.int64)
        counters = {name: coming.get(name, zeros) for name in COUNTERS}
        kept = self._with_room(keys, counters) >= 0
        super().write_keys(keys[kept])
        for name, values in coming.items():
            self._write(name, values[kept])

    def _write(self, name: str, values: np.ndarray) -> None:
        """Sets a column of the keys that there are."""
        if name not in COUNTERS:
            super().write(name, values)
            return
        keys = self._keys_to_write_for()
        values = _checked(values, len(keys), f"{self._owner}: {name}")
        shard_of = shards_of(keys, self._replicas.world)
        for rank, shard in zip(self._replicas.ranks, self.shards, strict=True):
            mine = shard_of == rank
            # By key here, by row there.
            place = np.searchsorted(keys[mine], shard.keys())
            shard.set_counters(name, values[mine][place])

    def save(self, name: str, key: str, session: Session) -> None:
        """See the base class.

        Raises:
            RuntimeError: another thread changed the keys since the session
                began to save the table.
        """
        saving, before = self._saving
        if saving() is not session:
            before = self._moment()
            self._saving = weakref.ref(session), before
        if name not in COUNTERS:
            super().save(name, key, session)
        else:
            values = [shard.counters(name) for shard in self.shards]
            self._save_numbers(key, session, values, self.key_counts(), ())
        self._require_moment(before, "it was saved")

    def _save_numbers(
        self,
        key: str,
        session: Session,
        values: Sequence[np.ndarray],
        sizes: Sequence[int],
        row: tuple[int, ...],
    ) -> None:
        """Writes all shards' numbers, one shard after the other."""
        writer = session.writer(self._replicas)
        if sum(sizes) == 0:
            if self._replicas.worker == 0:
                writer.add(key, tf.zeros((0, *row), tf.int64))
            return
        for rank, value in zip(self._replicas.ranks, values, strict=True):
            first = sum(sizes[:rank])
            writer.add_blocks(key, tf.constant(value), sum(sizes), first)

    def candidates(self) -> np.ndarray:
        """All candidates, [c, 3] int64, in the order of their keys."""
        values = [shard.candidates() for shard in self.shards]
        if self.workers > 1:
            sizes = self.candidate_counts()
            columns = [
                self._numbers_in_blocks([v[:, i] for v in values], sizes)
                for i in range(3)
            ]
            values = [np.stack(c, 1) for c in zip(*columns, strict=True)]
        found = np.concatenate(values)
        return found[np.argsort(found[:, 0])]

    def candidate_counts(self) -> list[int]:
        """The number of candidates of each shard; all workers must ask."""
        sizes = [len(shard.candidates()) for shard in self.shards]
        if self.workers == 1:
            return self._by_rank(sizes)
        sent = [tf.constant([size], tf.int64) for size in sizes]
        return self._gather(sent, self._channel).tolist()

    def write_candidates(self, candidates: np.ndarray) -> None:
        """Replaces all candidates, [c, 3] int64."""
        candidates = _checked_candidates(candidates, self._owner)
        for rank, shard in zip(self._replicas.ranks, self.shards, strict=True):
            shard.set_candidates(self._of_shard(candidates, rank))

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

    def save_candidates(self, key: str, session: Session) -> None:
        """Writes the candidates, shard after shard."""
        values = [shard.candidates() for shard in self.shards]
        sizes = self.candidate_counts()
        self._save_numbers(key, session, values, sizes, (3,))

    def read_new_keys(self, key: str, reader: BundleReader) -> None:
        """See the base class; reads the counters and candidates as well."""
        keys = _read(key, reader)
        where = f"{self._owner}: '{reader.prefix}'"
        if keys.ndim != 1 or keys.dtype != np.int64:
            raise ValueError(
                f"{where} has keys of {keys.dtype} and shape "
                f"{list(keys.shape)}, not int64 of shape [n]."
            )
        if len(np.unique(keys)) != len(keys):
            raise ValueError(f"{where}: its keys must all differ.")
        counters = {}
        for name in COUNTERS:
            there = sibling(key, name)
            if there in reader.shapes:
                counters[name] = _checked(
                    _read(there, reader), len(keys), f"{where}: its {name}"
                )
        candidates = sibling(key, CANDIDATES)
        if candidates in reader.shapes:
            counters[CANDIDATES] = _checked_candidates(
                _read(candidates, reader), where
            )
        self._set_new(keys, counters, reader.prefix)
        self._saved_at = _step_of(key, reader)

    def read_new_numbers(self, rows: int, prefix: str) -> None:
        """Makes keys of the numbers of a table's rows; see `read_new_keys`."""
        self._set_new(np.arange(rows, dtype=np.int64), {}, prefix)

    def _set_new(
        self, keys: np.ndarray, counters: dict[str, np.ndarray], prefix: str
    ) -> None:
        zeros = np.zeros(len(keys), np.int64)
        new = {FREQUENCY: zeros, LAST_USED: zeros, **counters}
        self._has_uses = LAST_USED in counters
        self._shard_of = self._with_room(keys, new, self._has_uses)
        self.source, self.num_new_keys = prefix, len(keys)
        self._new_keys, self._new = keys, new

    def _with_room(
        self,
        keys: np.ndarray,
        counters: Mapping[str, np.ndarray],
        evict: bool = True,
    ) -> np.ndarray:
        """Finds which keys the shards have room for.

        Args:
            keys: [n] int64.
            counters: their counters, by name.
            evict: whether the table's rule may leave keys out.

        Returns:
            The shards of keys, [n] int32, -1 for those without room: the keys
            that would be evicted last stay.

        Raises:
            ValueError: a shard has no room for all of its keys, and none may be
                left out.
        """
        shard_of = shards_of(keys, self._replicas.world)
        if not (self._may_leave_out if evict else growth.may_shrink()):
            self._require_room(keys)
        if not self._shortage(shard_of):
            return shard_of
        order = eviction_order(
            self._spec, keys, counters[FREQUENCY], counters[LAST_USED]
        )
        for rank in range(self._replicas.world):
            mine = order[shard_of[order] == rank]
            shard_of[mine[: max(0, len(mine) - self._capacity)]] = -1
        return shard_of

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

    def restore_keys(self) -> None:
        """See the base class."""
        new = self._new
        candidates = new.get(CANDIDATES, np.zeros([0, 3], np.int64))
        for rank, shard in zip(self._replicas.ranks, self.shards, strict=True):
            mine = self._shard_of == rank
            shard.replace(
                self._new_keys[mine],
                new[FREQUENCY][mine],
                new[LAST_USED][mine],
                self._of_shard(candidates, rank),
            )
        if np.any(self._shard_of < 0):
            self._say_left_out(self._new_keys, f" of '{self.source}'")
        seen = np.concatenate([new[LAST_USED], candidates[:, 2]])
        self._newest = int(seen.max()) if self._has_uses and seen.size else None
        self._new_keys, self._new = self._new_keys[:0], {}
        if self._has_step:
            self.count_from_step()

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
                candidates = shard.candidates() + np.array([0, 0, later])
                shard.set_counters(LAST_USED, shard.counters(LAST_USED) + later)
                shard.set_candidates(candidates)

    @property
    def has_new_keys(self) -> bool:
        """Whether new keys were read that are not restored yet."""
        return bool(self._new)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The rows of keys, [n] int64, on their shards; -1: none.

        With several workers all must ask for the same keys.
        """
        found = []
        shard_of = shards_of(keys, self._replicas.world)
        for rank, shard in zip(self._replicas.ranks, self.shards, strict=True):
            rows = shard.find(tf.constant(keys, tf.int64)).numpy()
            known = (shard_of == rank) & (rows >= shard.FIRST_ROW)
            found.append(np.where(known, rows - shard.FIRST_ROW, -1))
        if self.workers > 1:
            sizes = [len(keys)] * self._replicas.world
            found = self._numbers_in_blocks(found, sizes)
        return np.max(found, 0)

    def remove(self, keys: np.ndarray, evicted: bool = False) -> int:
        """Takes keys' rows; returns how many of this process's had one.

        Args:
            keys: [n] int64, unique.
            evicted: whether they count as evicted.
        """
        shard_of = shards_of(keys, self._replicas.world)
        return sum(
            shard.remove(keys[shard_of == rank], evicted)
            for rank, shard in zip(
                self._replicas.ranks, self.shards, strict=True
            )
        )

    def statistics(self) -> np.ndarray:
        """The sums of all shards' statistics, [8] int64."""
        here = [shard.key_table.statistics() for shard in self.shards]
        if self.workers > 1:
            sizes = [len(here[0])] * self._replicas.world
            here = self._numbers_in_blocks(here, sizes)
        return np.sum(here, 0)

    def capacities(self) -> list[int]:
        """How many keys each shard has room for; all workers must ask."""
        here = [shard.capacity() for shard in self.shards]
        if self.workers == 1:
            return [int(c) for c in self._by_rank(here)]
        return self._gather([c[None] for c in here], self._channel).tolist()


class DynamicColumn(Column):
    """A column of a table whose keys come and go; see `Column`."""

    _rows: DynamicKeyedRows

    @property
    def optional(self) -> bool:  # type: ignore[override]
        """Whether there are checkpoints without it: of tables of other kinds.

        Their keys are then the numbers of their rows.
        """
        return self._which in (KEYS, *COUNTERS)

    def check(self, key: str, reader: BundleReader) -> None:
        """See the base class."""
        if self._which in COUNTERS:
            return  # It was read, and checked, with the keys.
        if self._which == "parameters" and sibling(key, KEYS) not in (
            reader.shapes
        ):
            self._rows.read_new_numbers(reader.shapes[key][0], reader.prefix)
        super().check(key, reader)

    def restore(self, key: str, reader: BundleReader) -> None:
        """See the base class."""
        if self._which in COUNTERS:
            return
        if self._which != KEYS and self._rows.has_new_keys:
            self._rows.restore_keys()
        super().restore(key, reader)


class CandidatesColumn(DynamicColumn):
    """The candidates, [c, 3] int64: key, occurrences, last seen in step."""

    optional = True

    @property
    def current_shape(self) -> tf.TensorShape:
        """The shape, with the candidates there are; all workers must ask."""
        return tf.TensorShape([sum(self._rows.candidate_counts()), 3])

    def numpy(self) -> np.ndarray:
        """The whole value."""
        return self._rows.candidates()

    def assign(self, value: Any) -> None:
        """Sets the whole value.

        Raises:
            ValueError: it has another shape, or keys twice.
        """
        self._rows.write_candidates(np.asarray(value))

    def save(self, key: str, session: Session) -> None:
        """See the base class."""
        self._rows.save_candidates(key, session)

    def check(self, key: str, reader: BundleReader) -> None:
        """See the base class."""

    def restore(self, key: str, reader: BundleReader) -> None:
        """See the base class: the keys brought them."""


def eviction_order(
    table: TableSpec,
    keys: np.ndarray,
    frequency: np.ndarray,
    last_used: np.ndarray,
) -> np.ndarray:
    """The places of keys, [n] int64, from the first that goes to the last.

    Without an eviction rule they are in the order of "lru".

    Args:
        table: the table.
        keys: [n] int64.
        frequency: [n] int64, how often each was used.
        last_used: [n] int64, the step of its last use.

    Raises:
        ValueError: a function that is the rule returned something else than a
            number for each key.
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
