"""The state of a table with `DynamicKeys`: what `layer.tables[name]` is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.change_tracking import ChangedRows
from tfrs_embed.checkpoint.rows import (
    CANDIDATES,
    FALLBACK,
    KEYS,
    TEXT,
)
from tfrs_embed.compat.arguments import integer_or_none
from tfrs_embed.configs.dynamic_keys import are_counted
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.distribution import replicas
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.storage import clock, key_scores
from tfrs_embed.storage.fallback_variable import FallbackVariable
from tfrs_embed.storage.key_rules import (
    ABSENT,
    SPILLED,
    LiveKeys,
    eviction_order,
    is_expired,
)
from tfrs_embed.storage.key_table import KeyNumbers
from tfrs_embed.storage.key_texts import KeyTexts
from tfrs_embed.storage.keyed_rows import KeyedRows
from tfrs_embed.storage.keyed_shard import KeyedShard
from tfrs_embed.storage.keyed_variable import KeyedVariable
from tfrs_embed.storage.shard_texts import ShardTexts
from tfrs_embed.storage.sharded import Part
from tfrs_embed.storage.table_keys import TableKeys, as_counter
from tfrs_embed.storage.table_state import TableState, as_numbers
from tfrs_embed.storage.text_exchange import TextExchange

_STATISTICS = ("admitted", "evicted", "rejected", "hits")
_OF_SPILL = ("keys", "bytes", "written", "returned")


class DynamicTable(TableState):
    """A table with `DynamicKeys`: its keys, their rows and slots.

    It is `layer.tables[name]`. Call its methods eagerly, between steps. With
    several workers, all of them must call a method, with the same keys.

    A checkpoint holds, in one order, `<table>/keys`, [n] int64,
    `<table>/parameters` and `<table>/<slot>`, [n, dim] or [n], and
    `<table>/frequency` and `<table>/last_used`, [n] int64; and
    `<table>/candidates`, [c, 3] int64: a key, its number of occurrences, and
    the step of the last one. A table with eviction="score" has `<table>/score`,
    [n] float32, in the place of `<table>/frequency`. A table whose rule counts
    in time has `<table>/last_used_time`, in microseconds since 1970, in the
    place of `<table>/last_used`, and such times in `<table>/candidates`. With
    `fallback_rows` it also holds `<table>/fallback_parameters` and
    `<table>/fallback_<slot>`, by the rows' numbers. Strings are saved as their
    fingerprints; with `keep_text` also as `<table>/text`, [n] string. An
    `All2AllDenseEmbedding` that never removes keys saves no counters and no
    candidates.
    """

    def expose(self, stores: Sequence[KeyedRows], step: Any) -> None:
        """Creates what users and checkpoints see of this process's shards.

        Values of a checkpoint that was read before are written now. `step` is
        the engine's number of updates.
        """
        assert self.strategy is not None
        shared, exchange = replicas.get_replicas(self.strategy), None
        if shared.workers > 1:
            from tfrs_embed.storage.retrieval import Exchange

            exchange = Exchange(shared, None, self.spec.name)
        shards = [store.shards[self.spec.name] for store in stores]
        self.sources = [(Part(range(0)), store) for store in stores]
        self.exchange = exchange
        self._rows = TableKeys(self.spec, shards, shared, step)
        for rank, shard in self._rows.by_rank:
            shard.start_fallback(rank)
        self._keep_texts(shards)
        # Keys that have lost their rows, with the moment when that was seen.
        self._removed: list[tuple[int, np.ndarray]] = []
        assert self.spec.keys is not None
        counted = are_counted(self.spec.keys)
        # Keys come first: the other parts belong to them.
        parts = [KEYS, *self._rows.names]
        for part in parts + [*self._rows.counters, CANDIDATES] * counted:
            self.add(
                part,
                KeyedVariable(self.spec.name, part, self._rows, self.strategy),
            )
        for part in self._rows.names if self.spec.keys.fallback_rows else ():
            self.add(
                f"{FALLBACK}{part}",
                FallbackVariable(
                    self.spec.name, part, self._rows, self.strategy
                ),
            )
        if self.key_texts is not None:
            # Not among the variables, which Keras stores: HDF5 has no strings
            # of any length.
            texts = KeyedVariable(
                self.spec.name, TEXT, self._rows, self.strategy
            )
            texts.table = self
            self._track_trackable(texts, TEXT, overwrite=True)
        assert self.moments is not None
        self.moments.watch(self._note_removed)

    def _keep_texts(self, shards: Sequence[KeyedShard]) -> None:
        assert self.spec.keys is not None
        if not self.spec.keys.keep_text:
            return
        exchange, shared = None, self._rows.replicas
        if shared.workers > 1:
            exchange = TextExchange(shared, self.spec.name)
        texts = KeyTexts(self.spec.name, self.spec.vocabulary_size, exchange)
        for shard in shards:
            spills = shard.spill is not None
            shard.texts = ShardTexts(texts, shard.key_table, spills)
        self._rows.texts = self.key_texts = texts

    def step_restored(self) -> None:
        """Called when the layer's step exists and, if pending, was restored."""
        self._rows.count_from_step()

    def changed(self, since: int) -> ChangedRows:
        """Returns the keys that have changed since a moment.

        See `TableState.changed`. New keys are among the changed ones; keys
        that have lost their rows, and have none now, are `removed`.
        """
        self._tracked()
        rows = self.built("changed")
        self._note_removed()
        mark = self._mark_of(since)
        noted = [keys for moment, keys in self._removed if moment > since]
        removed = np.unique(np.concatenate([np.zeros([0], np.int64), *noted]))
        with_rows = np.concatenate(
            [removed[places] for _, places, _ in rows.located(removed)]
        )
        found = []
        for shard in rows.shards:
            keys, places, *_ = shard.live()
            spilled = places >= SPILLED
            marks = shard.store.marks.variables[self.spec.name].numpy()
            changed = marks[np.where(spilled, ABSENT, places)] > mark
            # Those that lost their rows in memory since then had changed there,
            # as far as is known.
            changed[spilled] = np.isin(keys[spilled], removed)
            found.append(keys[changed])
        return ChangedRows(
            np.concatenate(found),
            np.setdiff1d(removed, with_rows),
            tuple(map(len, found)),
        )

    def _note_removed(self) -> None:
        """Takes notes of keys that have lost their rows since the last call.

        Too many are forgotten; then changes since then are not known.
        """
        assert self.moments is not None
        now, capacity, lost = self.moments.present, 0, 0
        # The others were removed before the table was restored.
        self._removed = [r for r in self._removed if r[0] > self.known_since]
        for shard in self._rows.shards:
            numbers = shard.key_table.numbers()
            capacity += numbers.size + numbers.capacity
            keys = (shard.texts or shard.key_table).take_removed()
            if keys is None:
                lost = now
            elif len(keys):
                self._removed.append((now, keys))
        while sum(len(keys) for _, keys in self._removed) > 2 * capacity:
            lost = max(lost, self._removed.pop(0)[0])
        if lost:
            self.known_since = max(self.known_since, lost)
            self.restored_from = None

    @property
    def size(self) -> int:
        """The number of keys with rows."""
        return sum(self.built("size").numbers("size"))

    def counts(self) -> list[int]:
        """Returns each shard's number of keys; all workers must call it."""
        return self.built("the number of keys").numbers("size")

    @property
    def capacity(self) -> int:
        """The number of keys for which there is room now."""
        return sum(self.built("capacity").numbers("capacity"))

    def keys(self) -> np.ndarray:
        """Returns the keys with rows, [size] int64, ascending.

        uint64 keys keep their bits. Strings are the fingerprints that
        `tf.fingerprint` computes; if the table keeps their text, [size] of
        bytes in the order of fingerprints, b"" where the text isn't known:
        of keys of a checkpoint without texts, until a training step has their
        strings. `variables["keys"]` has the fingerprints.
        """
        self.built("keys")
        found: np.ndarray = self.variables[KEYS].numpy()
        texts = self.key_texts
        return found if texts is None else texts.read(found)

    def _learn(self, keys: np.ndarray, ids: Any) -> None:
        """Takes the texts of keys that have got rows between steps."""
        if self.key_texts is not None:
            strings = tf.convert_to_tensor(ids).numpy().tolist()
            self.key_texts.learn(keys, strings)

    def assign(self, ids: Any, vectors: Any) -> None:
        super().assign(ids, vectors)
        self._learn(as_numbers(self.spec, ids), ids)

    def lookup(self, keys: Any) -> np.ndarray:
        """Finds the rows of keys.

        Args:
            keys: [n], of the table's dtype of keys.

        Returns:
            [n] int64, the number of each key's row on the key's shard; -1 for a
            key without a row. Rows in a spill have numbers above 2**47.

        Raises:
            TypeError: the keys have another dtype.
            ValueError: the keys have another shape.
        """
        rows, wanted = self.built("lookup"), as_numbers(self.spec, keys)
        found = []
        for shard, places, rows_there in rows.located(wanted):
            here = np.full(len(wanted), -1)
            here[places] = rows_there - shard.key_table.first_row
            found.append(here)
        return np.max(rows.gather(found), 0)

    def assign_numbers(self, ids: np.ndarray, vectors: tf.Tensor) -> None:
        rows = self.built("assign")
        rows.add(ids)
        rows.write_for(PARAMETERS, ids, vectors)

    def give_rows(self, keys: Any) -> None:
        """Replaces all keys by others, with initial rows.

        Args:
            keys: [n], of the table's dtype of keys.

        Raises:
            TypeError: the keys have another dtype.
            ValueError: there is no room for the keys, or they have another
                shape.
        """
        self.built("give_rows")
        numbers = as_numbers(self.spec, keys)
        self.variables[KEYS].assign(np.unique(numbers))
        self._learn(numbers, keys)

    def remove(self, keys: Any) -> int:
        """Removes keys, their rows and counters, also from a spill.

        A candidate, a key that has no row yet, is forgotten. A key that comes
        back starts with an initial row.

        Args:
            keys: [n], of the table's dtype of keys.

        Returns:
            The number of these keys that had a row in this process.

        Raises:
            TypeError: the keys have another dtype.
            ValueError: the keys have another shape.
            RuntimeError: it is called in a traced function.
        """
        rows = self.built("remove")
        return remove_keys(rows, np.unique(as_numbers(self.spec, keys)))

    def evict(self, count: int | None = None) -> int:
        """Removes the keys that the table's eviction rule puts first.

        They don't go to a spill, and go from it.

        Args:
            count: how many keys. None: the expired ones, if the eviction rule
                is, or begins with, a `TimeToLive`.

        Returns:
            The number of this process's keys that lost their rows.

        Raises:
            ValueError: there is no eviction rule, or no count.
            RuntimeError: it is called in a traced function.
        """
        rows = self.built("evict")
        where = f"Table '{self.spec.name}'"
        if self.spec.keys.eviction is None:  # type: ignore[union-attr]
            raise ValueError(f"{where} has eviction=None: it evicts nothing.")
        integer_or_none(count, f"{where}: the number of keys to evict", 0)
        if count is None and not rows.rules.ttl:
            raise ValueError(f"{where}: say how many keys to evict.")
        known, now = counted_keys(self)
        if count is None:
            evicted = is_expired(rows.rules, known.last_used, now)
        else:
            evicted = eviction_order(rows.rules, known, now)[:count]
        return remove_keys(rows, known.keys[evicted], evicted=True)

    def score(self, keys: Any, values: Any) -> None:
        """Sets the scores of keys, by which eviction="score" evicts.

        The key with the least score goes first. A new key has the score 0. Only
        keys with rows have scores; steps don't change them.
        `variables["score"]`, [size] float32, has them in the order of
        `variables["keys"]`. Call it eagerly, between steps. With several
        workers, all of them must call it, with the same arguments.

        Example:
            >>> keys = tfrs_embed.DynamicKeys(eviction="score")
            >>> table = tfrs_embed.TableConfig("item", 100, 2, keys=keys)
            >>> layer = tfrs_embed.PartialTPUEmbedding(
            ...     tfrs_embed.FeatureConfig("item", table), "adagrad"
            ... )
            >>> layer.build()
            >>> items = layer.tables["item"]
            >>> items.give_rows([5, 6, 7])
            >>> items.score([7, 5], [0.5, 12.0])
            >>> items.variables["score"].numpy().tolist()
            [12.0, 0.0, 0.5]
            >>> items.evict(1), items.keys().tolist()
            (1, [5, 7])

        Args:
            keys: [n], of the table's dtype of keys. A key may be there twice,
                with equal scores.
            values: [n] numbers, finite as float32.

        Raises:
            TypeError: the keys have another dtype, or the values are no
                numbers.
            ValueError: the table has another rule; a shape is wrong; a value is
                not finite; a key has no row, or two scores. Then nothing has
                changed.
            RuntimeError: it is called in a traced function.
        """
        rows, where = self.built("score"), f"Table '{self.spec.name}'"
        if not rows.rules.scored:
            rule = self.spec.keys.eviction  # type: ignore[union-attr]
            raise ValueError(
                f"{where} has eviction={rule!r}, which needs no scores: they "
                "are for 'score', alone or after a TimeToLive."
            )
        given = as_numbers(self.spec, keys)
        scores = key_scores.checked(values, len(given), where)
        numbers = key_scores.as_numbers(scores)
        unique, first, inverse = np.unique(
            given, return_index=True, return_inverse=True
        )
        twice = np.flatnonzero(numbers != numbers[first][inverse])
        if len(twice):
            place = twice[0]
            raise ValueError(
                f"{where}: key {_named_key(keys, place)} has the scores "
                f"{scores[first[inverse[place]]]} and {scores[place]}."
            )
        without = rows.without_rows(unique)
        if len(without):
            place = first[np.searchsorted(unique, without[0])]
            raise ValueError(
                f"{where}: {len(without)} of the keys to score have no row, "
                f"such as {_named_key(keys, place)}. Only keys with rows have "
                "scores."
            )
        rows.score(unique, numbers[first], self.is_tracked)

    def statistics(self) -> dict[str, dict[str, int]]:
        """Counts what training steps did with keys: the last step, and all.

        Returns:
            "last_step" and "in_all", each with "admitted", the keys that got
            rows; "evicted", the keys that lost rows to others; "rejected", the
            keys that got no row; "hits", the occurrences of keys that had rows
            before the step. Counting starts when the table is made; checkpoints
            don't hold these numbers. A table with a spill has "spill" too: the
            number of "keys" in its files, the files' "bytes", and how many rows
            were "written" there and "returned".
        """
        rows = self.built("statistics")
        numbers = [shard.key_table.numbers() for shard in rows.shards]
        found = _named(self.spec, rows.gather(_statistics(numbers)))
        texts = self.key_texts
        if texts is not None:
            counts = np.array([*texts.counts().values()])
            nothing = [np.zeros_like(counts)] * (len(rows.shards) - 1)
            total = np.sum(rows.gather([counts, *nothing]), 0).tolist()
            found["text"] = dict(zip(texts.counts(), total, strict=True))
        return found

    def built(self, what: str) -> TableKeys:
        """Returns the table's keys; `what` is asked for, for errors.

        Raises:
            RuntimeError: it is called in a traced function.
            ValueError: the layer has no tables yet.
        """
        where = f"Table '{self.spec.name}': {what}"
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{where} can't be asked for in a function that is traced, as "
                "part of a step: ask between steps."
            )
        if not self.variables:
            raise ValueError(
                f"{where} is not known before the layer has its tables: call "
                "or build it first."
            )
        return self._rows


def counted_keys(table: DynamicTable) -> tuple[LiveKeys, int]:
    """Returns all keys with rows, ascending, and the moment now.

    All workers must call it; they get one moment.
    """
    rows = table.built("the counters")
    keys, *counters = (
        as_counter(name, table.variables[name].numpy())
        for name in (KEYS, *rows.counters)
    )
    now = clock.moment(rows.rules.by_time, rows.step)
    now = max(rows.gather.numbers([now] * len(rows.shards)))
    return LiveKeys(keys, None, *counters), now


def local_counters(table: DynamicTable) -> tuple[LiveKeys, dict[str, Any]]:
    """Returns the keys of this process's shards, and other counts of these.

    They are "capacity", the counts "in_all" of `statistics`, and "spill".
    """
    rows = table.built("the counters")
    live = zip(*(shard.live() for shard in rows.shards), strict=True)
    numbers = [shard.key_table.numbers() for shard in rows.shards]
    found: dict[str, Any] = _named(table.spec, _statistics(numbers))
    if rows.texts is not None:
        found["text"] = rows.texts.counts()
    del found["last_step"]
    counts = {**found.pop("in_all"), **found}
    counts["capacity"] = sum(n.capacity for n in numbers)
    return LiveKeys(*map(np.concatenate, live)), counts


def _named_key(keys: Any, place: int) -> Any:
    """Returns a key as the program gave it, for errors."""
    return np.asarray(keys)[place]


def _statistics(numbers: Sequence[KeyNumbers]) -> list[np.ndarray]:
    """Returns `last`, `total` and `spill` of each shard, [12]."""
    return [np.array([*n.last, *n.total, *n.spill]) for n in numbers]


def _named(
    spec: TableSpec, statistics: Sequence[np.ndarray]
) -> dict[str, dict[str, int]]:
    """Returns the sums of shards' statistics by name."""
    numbers = np.sum(statistics, 0).tolist()
    found = {
        "last_step": dict(zip(_STATISTICS, numbers[:4], strict=True)),
        "in_all": dict(zip(_STATISTICS, numbers[4:8], strict=True)),
    }
    if spec.has_files:
        found["spill"] = dict(zip(_OF_SPILL, numbers[8:], strict=True))
    return found


def remove_keys(
    rows: TableKeys, keys: np.ndarray, evicted: bool = False
) -> int:
    """Removes unique keys; returns how many had rows in this process.

    If `evicted`, they count as evicted.
    """
    if rows.texts is not None:
        # Before: a step of another thread may give the keys rows again.
        rows.texts.drop(keys.tolist())
    shard_of = rows.shards_of(keys)
    removed = [
        shard.key_table.remove(keys[shard_of == rank], evicted)
        for rank, shard in rows.by_rank
    ]
    return int(np.sum(np.concatenate(removed) != ABSENT))
