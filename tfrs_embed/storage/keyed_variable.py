"""A part of a table with keys, for checkpoints: keys, rows, or a slot."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader, BundleWriter, blocks
from tfrs_embed.checkpoint.names import in_delta, sibling
from tfrs_embed.checkpoint.rows import (
    CANDIDATES,
    KEYS,
    REMOVED,
    ChangedRows,
    CheckpointValue,
    HeldRows,
    Later,
    other_slot,
)
from tfrs_embed.checkpoint.session import Session
from tfrs_embed.checkpoint.value_copies import copy_for_saving
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.storage.composite import CompositeVariable
from tfrs_embed.storage.key_rules import LiveKeys
from tfrs_embed.storage.keyed_checkpoint import KeyedCheckpoint
from tfrs_embed.storage.keyed_shard import KeyedShard
from tfrs_embed.storage.table_keys import COUNTERS, TableKeys


class KeyedVariable(CompositeVariable, CheckpointValue):
    """A part of a table with keys, of all shards, sorted by key.

    With several workers, reading gathers the values of all, and saving has each
    worker write its own: all workers must do it. When the variable is written
    or restored, every worker gets the same value and keeps its shard.

    A checkpoint holds the part shard by shard, so that no process needs all of
    it. `TableKeys` lists the names of parts.
    """

    def __init__(
        self,
        table: str,
        part: str,
        rows: TableKeys,
        checkpoint: KeyedCheckpoint,
        strategy: tf.distribute.Strategy,
    ) -> None:
        super().__init__(rows.variables(part), strategy)
        self.name = f"{table}/{part}:0"
        self.dtype = tf.float32 if part in rows.names else tf.int64
        self.shape = tf.TensorShape([None, *rows.row_shape(part)])
        self.workers = rows.replicas.workers
        self._rows = rows
        self._checkpoint = checkpoint
        self._part = part
        # Keys come first: the other parts belong to them.
        self.order = 0 if part == KEYS else 1

    @property
    def optional(self) -> bool:  # type: ignore[override]
        """Whether checkpoints may lack this part, as of tables without keys."""
        return self._part not in self._rows.names

    @property
    def current_shape(self) -> tf.TensorShape:
        """The shape with the present number of keys; all workers must ask."""
        count = sum(self._rows.counts(self._part))
        return tf.TensorShape([count, *self.shape[1:]])

    def numpy(self) -> np.ndarray:
        return self._rows.read(self._part)

    def collect_rows(self, keys: np.ndarray) -> np.ndarray:
        """Returns rows of keys; all workers must call with the same keys."""
        return self._rows.collect(self._part, keys)

    def held(self) -> list[HeldRows]:
        if self._part not in self._rows.names:
            return []
        return self._rows.held(self._part)

    @property
    def nbytes(self) -> int:
        if self._part == CANDIDATES:
            return 0  # They are few, and small.
        count = sum(self._rows.local_counts().values())
        return count * math.prod(self.shape[1:]) * self.dtype.size

    def assign(self, value: Any) -> None:
        """Sets the whole value: keys replace all keys, and reset their rows.

        Rows and slots belong to the keys that the table has.

        Raises:
            ValueError: the shape is wrong, keys are not ascending, or a shard
                has no room for them.
        """
        self._rows.write(self._part, np.asarray(value))
        if self.table is None:
            return
        if self._part == KEYS:
            self.table.restored(None)
        else:
            self.table.assigned()

    def check_value(self, value: Any) -> None:
        """Raises ValueError if `assign` would refuse keys; changes nothing."""
        if self._part == KEYS:
            self._rows.check_keys(np.asarray(value))

    def save(self, key: str, session: Session) -> None:
        """Writes the part shard by shard; each worker writes its shards.

        Raises:
            RuntimeError: another thread changed the keys since the session
                began to save the table.
        """
        rows = self._rows
        moments = self._checkpoint.moments
        before = moments.setdefault(session, rows.moment())
        writer, sizes = session.writer(rows.replicas), rows.counts(self._part)
        shape = [sum(sizes), *self.shape[1:]]
        self._add_if_empty(key, writer, shape)
        for rank, shard in rows.by_ranks():
            first = sum(sizes[:rank])
            if self._part == CANDIDATES:
                seen = tf.constant(shard.integers(CANDIDATES))
                if len(seen):
                    writer.add_blocks(key, seen, shape[0], first)
                continue
            for start, block in self._blocks(shard, shard.live()):
                writer.add_rows(key, shape, first + start, block())
        rows.require_moment(before, "it was saved")

    def _add_if_empty(
        self, key: str, writer: BundleWriter, shape: Sequence[int]
    ) -> None:
        """Adds a value without rows, which the first worker writes."""
        if shape[0] == 0 and self._rows.replicas.worker == 0:
            writer.add(key, tf.zeros(shape, self.dtype))

    def _blocks(
        self, shard: KeyedShard, live: LiveKeys
    ) -> Iterator[tuple[int, Callable[[], tf.Tensor]]]:
        """Yields a part of keys in blocks: the first place, and the values."""
        name = self._part
        for start, size in blocks(
            [len(live.keys), *self.shape[1:]], tf.float32
        ):
            part = slice(start, start + size)
            if name in self._rows.names:
                yield (
                    start,
                    functools.partial(shard.gather, name, live.rows[part]),
                )
            else:
                yield (
                    start,
                    functools.partial(tf.constant, getattr(live, name)[part]),
                )

    def save_later(self, seen: dict[Any, Any]) -> Later | None:
        if self._part == CANDIDATES:
            return None
        rows = self._rows
        # Keys, and where their rows are; other keys that get these rows later
        # are among the changed ones, as are keys that come back.
        if rows not in seen:
            seen[rows] = [shard.live() for shard in rows.shards]
        live = seen[rows]
        shape = [sum(len(each.keys) for each in live), *self.shape[1:]]

        def adding(
            key: str, writer: BundleWriter
        ) -> Iterator[Callable[[], None]]:
            first = 0
            self._add_if_empty(key, writer, shape)
            for shard, each in zip(rows.shards, live, strict=True):
                for start, block in self._blocks(shard, each):
                    yield functools.partial(
                        writer.add_rows, key, shape, first + start, block()
                    )
                first += len(each.keys)

        return adding

    def save_changed(
        self, key: str, session: Session, changed: ChangedRows
    ) -> None:
        """Writes the part of changed keys, as `save` does; and removed keys."""
        rows = self._rows
        if self._part == CANDIDATES:
            self.save(key, session)
            return
        moments = self._checkpoint.moments
        before = moments.setdefault(session, rows.moment())
        writer = session.writer(rows.replicas)
        if self._part == KEYS:
            [at], count = session.places(rows.replicas, (self.table, REMOVED))
            removed = tf.constant(changed.removed, tf.int64)
            if count or rows.replicas.worker == 0:
                writer.add_blocks(in_delta(key, REMOVED), removed, count, at)
        starts, total = session.places(rows.replicas, self.table)
        shape = [total, *self.shape[1:]]
        self._add_if_empty(in_delta(key), writer, shape)
        of_shards = np.split(changed.rows, np.cumsum(changed.shards)[:-1])
        for shard, keys, first in zip(
            rows.shards, of_shards, starts, strict=True
        ):
            # Only counters need all of a shard's keys.
            counted = self._part in COUNTERS
            some = (
                shard.live(keys)
                if counted
                else LiveKeys(keys, shard.find(keys), None, None)
            )
            for start, block in self._blocks(shard, some):
                place = first + start
                writer.add_rows(in_delta(key), shape, place, block())
        rows.require_moment(before, "it was saved")

    def check(self, key: str, reader: BundleReader) -> None:
        checkpoint = self._checkpoint
        if self._part == KEYS:
            checkpoint.read_keys(key, reader)
        if self._part not in self._rows.names:
            return  # It was read, and checked, with the keys.
        where = f"'{self.name}' can't be restored from '{reader.prefix}'"
        there = reader.shapes[key]
        if self._part == PARAMETERS and sibling(key, KEYS) not in reader.shapes:
            checkpoint.read_numbers(there[0], reader.prefix)
        if checkpoint.source != reader.prefix:
            raise ValueError(f"{where}: it has no keys for its rows.")
        here = [checkpoint.num_new_keys, *self.shape[1:]]
        if there != here:
            raise ValueError(
                f"{where}: with its keys it has the shape {here} here, and "
                f"{there} there.{other_slot(here, there)}"
            )

    def restore(self, key: str, reader: BundleReader) -> None:
        # This restores counters and candidates too.
        self._checkpoint.restore_keys()
        if self._part not in self._rows.names:
            return
        there = sibling(key, KEYS)
        for start, size in blocks(reader.shapes[key], tf.float32):
            keys = np.arange(start, start + size)
            if there in reader.shapes:
                keys = reader.read_rows(there, start, size).numpy()
            values = reader.read_rows(key, start, size)
            self._rows.write_for(self._part, keys, values)

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        copy_for_saving(self, object_map, self.numpy)
