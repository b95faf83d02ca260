"""One shard of a table with keys: the keys, and their rows in a store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.rows import CANDIDATES
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import Slot
from tfrs_embed.storage import initial_key_values
from tfrs_embed.storage.key_room import eviction_order
from tfrs_embed.storage.key_rules import ABSENT, SPILLED, Live, key_rules
from tfrs_embed.storage.key_table import (
    SPILL_KEYS,
    Found,
    KeyTable,
    KeyTables,
)
from tfrs_embed.storage.row_store import RowStore

# How many numbers of initial values are made at once between steps.
_BLOCK_ELEMENTS = 1 << 20


class KeyedShard:
    """The keys and rows of one table on one of `world` shards.

    The store has `rows_at_first` rows of zeros, and initial slots.
    `make_initial` is what `initial_key_values.maker` returns. Errors name the
    layer as `owner`.
    """

    def __init__(
        self,
        owner: str,
        table: TableSpec,
        world: int,
        store: RowStore,
        slots: Mapping[str, Slot],
        make_initial: initial_key_values.Maker,
    ) -> None:
        self.owner = f"{owner}, table '{table.name}'"
        self.table = table.name
        self._table = table
        self.store = store
        self.variables = store.variables(table.name)
        self._slots = slots
        self.make_initial = make_initial
        assert table.keys is not None
        self.keys = table.keys
        self.rules = key_rules(table, world)
        spill = None
        if self.keys.spill is not None:
            # Few tables have one.
            from tfrs_embed.storage.spill import SpillSettings

            spill = SpillSettings(
                self.owner, self.keys.spill, self.variables, store.device
            )
        self.key_table = KeyTable(self.rules, store.device, spill)

    @property
    def dim(self) -> int:
        """The width of a row."""
        return self._table.dim

    def read(self, found: Found) -> tf.Tensor:
        """Reads keys' vectors, [n, dim]; see `KeyTables.check_vectors`."""
        with tf.device(self.store.device):
            vectors = self.store.read(self._table.name, PARAMETERS, found.rows)
            return self.key_table.check_vectors(found, vectors)

    def write(self, name: str, rows: tf.Tensor, values: tf.Tensor) -> None:
        """Sets rows, [n] int64, of the parameters or a slot."""
        with tf.device(self.store.device):
            self.store.write(self._table.name, name, rows, values)

    def fetch(
        self, keys: tf.Tensor, rows: tf.Tensor, parameters_only: bool = False
    ) -> None:
        """Gives keys that come back from the spill the rows that they had.

        The rows in memory, [n] int64, have initial values.
        """
        if self.key_table.spill is not None:
            self.key_table.spill.fetch(keys, rows, parameters_only)

    def reset(self, rows: tf.Tensor, initial: tf.Tensor) -> None:
        """Sets rows to initial values, and their slots too."""
        self.write(PARAMETERS, rows, initial)
        for name, slot in self._slots.items():
            self.write(name, rows, tf.constant(slot.initial))

    # For users and checkpoints, eagerly.

    def live(self) -> Live:
        """Returns the keys with rows, sorted by row."""
        live = self.key_table.live()
        order = np.argsort(live.rows)
        return Live(*(values[order] for values in live))

    def integers(self, name: str) -> np.ndarray:
        """Returns the keys or a counter, sorted by row; or the candidates."""
        if name == CANDIDATES:
            return self.key_table.candidates()
        return getattr(self.live(), name)

    def gather(self, name: str, rows: np.ndarray) -> tf.Tensor:
        """Returns rows of the parameters or a slot, in the host's memory."""
        spill, spilled = self.key_table.spill, rows >= SPILLED
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
            found = self.store.read(self._table.name, name, numbers)
        with tf.device("CPU:0"):
            return tf.identity(found)

    def write_some(self, name: str, rows: np.ndarray, values: Any) -> None:
        """Sets rows, in memory or in the spill; one scalar is for all."""
        spill, spilled = self.key_table.spill, rows >= SPILLED
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
        self,
        keys: np.ndarray,
        frequency: np.ndarray,
        last_used: np.ndarray,
        candidates: np.ndarray,
    ) -> None:
        """Replaces all keys; their rows and slots have initial values.

        Keys, unique, and counters are [n] int64; candidates are [c, 3]. With a
        spill, those that would be evicted first are there if there are too
        many.
        """
        in_memory = len(keys)
        if self.key_table.spill is not None:
            in_memory = min(in_memory, self.rules.max_capacity)
            order = eviction_order(self._table, keys, frequency, last_used)
            keys, frequency, last_used = (
                values[order[::-1]] for values in (keys, frequency, last_used)
            )
        rows, version = self.key_table.replace(
            keys, frequency, last_used, candidates, in_memory
        )
        ensure_rows([self], [self.key_table.physical()])
        size = max(1, _BLOCK_ELEMENTS // self.dim)
        for start in range(0, len(keys), size):
            part = slice(start, start + size)
            made = self.make_initial(tf.constant(keys[part], tf.int64))
            self.write_some(PARAMETERS, rows[part], made)
            for name, slot in self._slots.items():
                self.write_some(name, rows[part], slot.initial)
        self.key_table.publish(version)

    def set_known(
        self,
        frequency: np.ndarray | None = None,
        last_used: np.ndarray | None = None,
        candidates: np.ndarray | None = None,
    ) -> None:
        """Sets counters, [n] sorted by row, and candidates; None: unchanged."""
        live = self.live()
        if candidates is None:
            candidates = self.key_table.candidates()
        in_memory = int(np.sum(live.rows < SPILLED))
        rows, version = self.key_table.replace(
            live.keys,
            live.frequency if frequency is None else frequency,
            live.last_used if last_used is None else last_used,
            candidates,
            in_memory,
        )
        # Those in the spill stay where they are.
        before, rows = live.rows[:in_memory], rows[:in_memory]
        if not np.array_equal(before, rows):
            for name in self.variables:
                values = self.gather(name, before)
                self.write(name, tf.constant(rows, tf.int64), values)
        self.key_table.publish(version)


def ensure_rows(
    shards: Sequence[KeyedShard], rows: Sequence[tf.Tensor]
) -> None:
    """Gives shards' variables at least so many rows, scalars int64."""
    wanted: dict[RowStore, dict[str, tf.Tensor]] = {}
    for shard, number in zip(shards, rows, strict=True):
        rules = shard.rules
        if rules.policy == "none" and rules.max_capacity == rules.capacity:
            continue  # Nothing makes room: there are all that there can be.
        wanted.setdefault(shard.store, {})[shard.table] = number
    for store, of_store in wanted.items():
        store.resize(of_store)


class KeyedShards:
    """Shards of tables of one width, on one device, used together."""

    def __init__(self, shards: Sequence[KeyedShard]) -> None:
        self.shards = tuple(shards)
        self.key_tables = KeyTables([shard.key_table for shard in shards])
        self.dim = shards[0].dim

    def no_room(
        self,
        keys: tf.Tensor,
        table_of: tf.Tensor | None,
        counts: tf.Tensor | None,
        lacking: tf.Tensor,
    ) -> tf.Tensor:
        """Returns an error's text: a step's keys lack rows; a scalar string.

        Keys and counts are those of `Request`; `lacking`, [tables] int64, says
        how many rows each table lacks.
        """
        owners = [(shard.owner, shard.keys) for shard in self.shards]

        def text(
            info: np.ndarray,
            lacking: np.ndarray,
            absent: np.ndarray,
            table_of: np.ndarray,
            keys: np.ndarray,
        ) -> bytes:
            worst = np.argmax(lacking)
            size, capacity = info[worst, :2]
            size -= info[worst, SPILL_KEYS]
            owner, declared = owners[worst]
            if len(table_of):
                absent &= table_of == worst
            [key] = keys[absent][:1] if absent.any() else [np.int64(0)]
            if declared.dtype == tf.uint64:
                key = key.view(np.uint64)
            is_string = declared.dtype == tf.string
            return (
                f"{owner}: no room for the keys of this step: a shard has rows "
                f"for {capacity} keys, and holds {size}. It needs "
                f"{lacking[worst]} rows more than it can make room for; {key} "
                f"is {'the fingerprint of ' * is_string}a key without one. "
                f"{declared.MORE_ROOM}"
            ).encode()

        absent = tf.equal(self.key_tables.look_up(keys, table_of).rows, ABSENT)
        if counts is not None:
            absent &= counts > 0
        if table_of is None:
            table_of = tf.zeros([0], tf.int32)
        inputs = [self.key_tables.info(), lacking, absent, table_of, keys]
        with tf.device("CPU:0"):
            made = tf.numpy_function(text, inputs, tf.string, stateful=False)
            return tf.ensure_shape(made, [])

    def make_initial(self, keys: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
        """Makes keys' initial rows, [m, dim], in the order of tables."""
        makers = [shard.make_initial for shard in self.shards]
        return initial_key_values.make_rows(makers, keys, sizes)
