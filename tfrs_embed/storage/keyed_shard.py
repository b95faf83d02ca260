"""One shard of a table with keys: the keys, and their rows in a store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.rows import CANDIDATES
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.storage import initial_key_values
from tfrs_embed.storage.key_rules import (
    ABSENT,
    FIRST_ROW,
    SPILLED,
    LiveKeys,
    eviction_order,
    key_rules,
)
from tfrs_embed.storage.key_table import KeyTable
from tfrs_embed.storage.row_store import TableShare

if TYPE_CHECKING:
    from tfrs_embed.storage.shard_texts import ShardTexts
    from tfrs_embed.storage.spill import Spill

# Initial values are made in blocks of this many numbers between steps.
_BLOCK_ELEMENTS = 1 << 20


class KeyedShard:
    """The keys and rows of one table on one shard, in a `KeyedRows` store.

    Attributes:
        texts: tells the texts of the table's keys which keys are here; None:
            texts aren't kept.
    """

    texts: ShardTexts | None = None

    def __init__(self, share: TableShare, store: Any) -> None:
        table = share.spec
        assert table.keys is not None
        self.layer = share.layer
        self.owner = f"{share.layer}, table '{table.name}'"
        self.table = table
        self.store = store
        self.variables = store.variables(table.name)
        self.is_trained = share.trained
        self._slots = share.slots
        self.make_initial = initial_key_values.maker(table)
        self.rules = key_rules(table, share.world)
        self.spill: Spill | None = None
        if table.keys.spill is not None:
            # Few tables have one.
            from tfrs_embed.storage.spill import Spill

            self.spill = Spill(
                self.owner, table.keys.spill, self.variables, store.device
            )
        self.key_table = KeyTable(
            self.rules, store.device, self.spill, table.name
        )
        # The rows with which keys start that a step admits.
        self.make_first: initial_key_values.Maker = self.make_initial
        if self.rules.fallback_rows:
            self.make_first = self._read_fallback

    def _read_fallback(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the present values of keys' shared rows, [n, dim]."""
        rows = self.key_table.fallback.of(keys)
        with tf.device(self.store.device):
            return self.store.read(self.table.name, PARAMETERS, rows)

    def make_room(self, rows: Any) -> None:
        """Gives the table at least so many rows, a scalar int64."""
        rules = self.rules
        if rules.policy == "none" and rules.max_capacity == rules.capacity:
            return  # Nothing makes room: there are all that there can be.
        self.store.make_room(self.table.name, rows, self._slots)

    def write(self, name: str, rows: tf.Tensor, values: tf.Tensor) -> None:
        """Sets rows, [n] int64, of the parameters or a slot."""
        with tf.device(self.store.device):
            self.store.write(self.table.name, name, rows, values)

    def give(
        self,
        keys: tf.Tensor,
        rows: tf.Tensor,
        initial: tf.Tensor,
        step: tf.Tensor,
        parameters_only: bool,
    ) -> None:
        """Gives new keys their rows in memory, [n] int64, in a step.

        They have initial values, and initial slots unless `parameters_only`:
        then the rows are reserved only. Keys that come back from the spill have
        the values from there.
        """
        self.write(PARAMETERS, rows, initial)
        if not parameters_only:
            for name, slot in self._slots.items():
                self.write(name, rows, tf.constant(slot.initial))
        if self.spill is not None:
            self.spill.fetch(keys, rows, parameters_only)
        if self.texts is not None:
            self.texts.note(keys, step, parameters_only)

    # For users and checkpoints, eagerly.

    def score(self, keys: np.ndarray, scores: np.ndarray, marks: bool) -> None:
        """Sets the scores of keys with rows, [n] int64 each, numbers.

        If `marks`, the keys count as changed from now on.
        """
        rows = self.key_table.score(keys, scores)
        if marks:
            # In a spill the key table notes them.
            here = rows[(rows != ABSENT) & (rows < SPILLED)]
            self.store.marks.mark_some(self.table.name, tf.constant(here))

    def start_fallback(self, rank: int) -> None:
        """Gives the shared rows of the shard of a rank initial values.

        Row g of all shards has the values with which key g would start.
        """
        rows = np.arange(FIRST_ROW, self.key_table.first_row)
        numbers = rank + self.rules.world * np.arange(len(rows))
        self._initialize(numbers, rows)

    def find(self, keys: np.ndarray) -> np.ndarray:
        """Returns keys' rows, [n] int64; `ABSENT` for a key without one."""
        found = self.key_table.lookup(tf.constant(keys), shared=False)
        rows = found.rows.numpy()
        if self.spill is None:
            return rows
        return np.where(rows == ABSENT, self.spill.find(keys).numpy(), rows)

    def live(self, keys: np.ndarray | None = None) -> LiveKeys:
        """Returns the keys with rows, sorted by row, or some of them as given.

        All of `keys`, [n] int64, must have rows.
        """
        live = LiveKeys(*(v.numpy() for v in self.key_table.export()))
        order = np.argsort(live.rows)
        if keys is not None:
            order = order[np.searchsorted(live.rows[order], self.find(keys))]
        return live.select(order)

    def integers(self, name: str) -> np.ndarray:
        """Returns a field of `live`, or the candidates.

        Those are, in any order, [c, 3] int64: a key, its number of occurrences,
        and the moment of the last one.
        """
        if name == CANDIDATES:
            keys, _, *seen = self.key_table.export(candidates=True)
            return np.stack([keys, *seen], 1)
        found: np.ndarray = getattr(self.live(), name)
        return found

    def gather(self, name: str, rows: np.ndarray) -> tf.Tensor:
        """Returns rows of the parameters or a slot, in the host's memory."""
        spill, spilled = self.spill, rows >= SPILLED
        if spill is not None and spilled.any():
            variable = self.variables[name]
            values = np.empty(
                (len(rows), *variable.shape[1:]), variable.dtype.as_numpy_dtype
            )
            values[spilled] = spill.read(name, rows[spilled])
            values[~spilled] = self.gather(name, rows[~spilled])
            with tf.device("CPU:0"):
                return tf.constant(values)
        with tf.device(self.store.device):
            numbers = tf.constant(rows, tf.int64)
            found = self.store.read(self.table.name, name, numbers)
        with tf.device("CPU:0"):
            return tf.identity(found)

    def write_some(self, name: str, rows: np.ndarray, values: Any) -> None:
        """Sets rows, in memory or in the spill; one scalar is for all."""
        spill, spilled = self.spill, rows >= SPILLED
        if spill is not None and spilled.any():
            values = np.asarray(values, np.float32)
            if values.ndim:
                spill.write(name, rows[spilled], values[spilled])
                values = values[~spilled]
            else:
                spill.write(name, rows[spilled], values)
            rows = rows[~spilled]
        self.write(name, tf.constant(rows, tf.int64), tf.constant(values))

    def replace(
        self, known: LiveKeys, candidates: np.ndarray, now: int
    ) -> None:
        """Replaces all keys; their rows and slots have initial values.

        Keys are unique; candidates are [c, 3]. With a spill, those that would
        be evicted first at the moment `now` are there if there are too many.
        """
        in_memory = len(known.keys)
        if self.spill is not None:
            in_memory = min(in_memory, self.rules.max_capacity)
            order = eviction_order(self.rules, known, now)
            known = known.select(order[::-1])
        keys, _, frequency, last_used = known
        version = self.key_table.replace(
            keys, frequency, last_used, candidates, in_memory
        )
        if self.texts is not None:
            self.texts.take_gone()  # Those that come back are not gone.
        rows = self.key_table.first_row + np.arange(len(keys))
        if self.spill is not None:
            rows[in_memory:] = self.spill.find(keys[in_memory:])
        self.make_room(self.key_table.numbers().physical)
        self._initialize(keys, rows)
        self.key_table.publish(version)

    def set_known(
        self,
        frequency: np.ndarray | None = None,
        last_used: np.ndarray | None = None,
        candidates: np.ndarray | None = None,
    ) -> None:
        """Sets counters, [n] sorted by row, and candidates; None: unchanged."""
        live = self.live()
        if frequency is not None:
            live = live._replace(frequency=frequency)
        if last_used is not None:
            live = live._replace(last_used=last_used)
        if candidates is None:
            candidates = self.integers(CANDIDATES)
        self._replace(live, np.zeros([0], np.int64), 0, candidates)

    def add(self, keys: np.ndarray, now: int) -> None:
        """Gives rows to those of unique keys, [n] int64, that have none.

        They count as seen once, at the moment `now`, or have the score 0. There
        must be room.
        """
        new = keys[self.find(keys) == ABSENT]
        candidates = self.integers(CANDIDATES)
        kept = candidates[~np.isin(candidates[:, 0], new)]
        self._replace(self.live(), new, now, kept)

    def _replace(
        self,
        live: LiveKeys,
        new: np.ndarray,
        now: int,
        candidates: np.ndarray,
    ) -> None:
        """Sets the counters of keys with rows, and gives rows to new keys."""
        before = live.rows[live.rows < SPILLED]
        count, total = len(before), len(before) + len(new)

        def with_new(values: np.ndarray, added: Any) -> np.ndarray:
            added = np.broadcast_to(np.asarray(added, np.int64), [len(new)])
            return np.concatenate([values[:count], added, values[count:]])

        version = self.key_table.replace(
            with_new(live.keys, new),
            with_new(live.frequency, 0 if self.rules.scored else 1),
            with_new(live.last_used, now),
            candidates,
            total,
        )
        self.make_room(self.key_table.numbers().physical)
        # Those in the spill stay where they are.
        rows = self.key_table.first_row + np.arange(total)
        if not np.array_equal(before, rows[:count]):
            for name in self.variables:
                values = self.gather(name, before)
                self.write(name, tf.constant(rows[:count], tf.int64), values)
        self._initialize(new, rows[count:])
        self.key_table.publish(version)

    def _initialize(self, keys: np.ndarray, rows: np.ndarray) -> None:
        """Gives keys' rows, in memory or in the spill, initial values."""
        size = max(1, _BLOCK_ELEMENTS // self.table.dim)
        for start in range(0, len(keys), size):
            part = slice(start, start + size)
            made = self.make_initial(tf.constant(keys[part], tf.int64))
            self.write_some(PARAMETERS, rows[part], made)
            for name, slot in self._slots.items():
                self.write_some(name, rows[part], slot.initial)
