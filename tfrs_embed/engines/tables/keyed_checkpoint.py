"""A table of keys in checkpoints: saved by shards, restored by keys."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader, blocks
from tfrs_embed.checkpoint.rows import (
    CANDIDATES,
    KEYS,
    LAST_USED,
    key_of,
    sibling,
)
from tfrs_embed.checkpoint.session import Session
from tfrs_embed.engines.tables.keyed_rows import (
    COUNTERS,
    INTEGERS,
    KeyedRows,
    checked_integers,
)


class KeyedCheckpoint:
    """Saves and restores a table's keys, what is known of them, and rows.

    A restore reads and checks keys, counters and candidates before anything
    changes; then it replaces all keys, and writes rows and slots in blocks.

    Args:
        rows: the table.
        step: the number of updates made, as the engine has it.

    Attributes:
        source: the checkpoint that new keys were last read from.
        num_new_keys: the number of these keys.
        restored: whether these keys have been restored.
    """

    def __init__(self, rows: KeyedRows, step: Any) -> None:
        self.source: str | None = None
        self.num_new_keys = 0
        self.restored = True
        self._rows = rows
        self._step = step
        # New keys in the checkpoint's order, what is known of them, and which
        # of them there is room for.
        self._keys = np.zeros([0], np.int64)
        self._known: dict[str, np.ndarray] = {}
        self._kept = np.zeros([0], bool)
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
        table = self._rows
        saving, before = self._saving
        if saving() is not session:
            before = table.moment()
            self._saving = weakref.ref(session), before
        writer, sizes = session.writer(table.replicas), table.counts(name)
        row = table.row_shape(name)
        shape = [sum(sizes), *row]
        if shape[0] == 0:
            if table.replicas.worker == 0:
                dtype = tf.int64 if name in INTEGERS else tf.float32
                writer.add(key, tf.zeros(shape, dtype))
            return
        for rank, shard in table.by_ranks():
            first = sum(sizes[:rank])
            if name in INTEGERS:
                integers = tf.constant(shard.integers(name))
                writer.add_blocks(key, integers, shape[0], first)
                continue
            rows = shard.live().rows
            for start, size in blocks([sizes[rank], *row], tf.float32):
                block = shard.gather(name, rows[start : start + size])
                writer.add_rows(key, shape, first + start, block)
        table.require_moment(before, "it was saved")

    def read_keys(self, key: str, reader: BundleReader) -> None:
        """Reads the keys that `restore_keys` is to put in the place of all.

        Counters and candidates are read with them.

        Args:
            key: the checkpoint's key.
            reader: the checkpoint.

        Raises:
            ValueError: they are no keys, or a shard has no room for its own.
        """
        keys = _read(key, reader)
        where = f"{self._rows.owner}: '{reader.prefix}'"
        if keys.ndim != 1 or keys.dtype != np.int64:
            raise ValueError(
                f"{where} has keys of {keys.dtype} and shape "
                f"{list(keys.shape)}, not int64 of shape [n]."
            )
        if len(np.unique(keys)) != len(keys):
            raise ValueError(f"{where}: its keys must all differ.")
        known = {}
        for name in (*COUNTERS, CANDIDATES):
            there = sibling(key, name)
            if there in reader.shapes:
                known[name] = checked_integers(
                    name, _read(there, reader), len(keys), where
                )
        self._take(keys, known, reader.prefix)
        self._saved_at = _step_of(key, reader)

    def read_numbers(self, rows: int, prefix: str) -> None:
        """Makes keys of the numbers of a table's rows; see `read_keys`."""
        self._take(np.arange(rows, dtype=np.int64), {}, prefix)

    def _take(
        self, keys: np.ndarray, known: dict[str, np.ndarray], prefix: str
    ) -> None:
        self._rows.room.require(keys, evict=LAST_USED in known)
        self._newest_of_new = None
        if LAST_USED in known:
            candidates = known.get(CANDIDATES, np.zeros([0, 3], np.int64))
            seen = np.concatenate([known[LAST_USED], candidates[:, 2]])
            self._newest_of_new = int(seen.max()) if seen.size else None
        for name in COUNTERS:
            known.setdefault(name, np.zeros(len(keys), np.int64))
        self._kept = self._rows.room.choose(keys, known)
        self._keys, self._known = keys, known
        self.source, self.num_new_keys = prefix, len(keys)
        self.restored = False

    def restore_keys(self) -> None:
        """Replaces all keys by the new ones that were read.

        Their rows and slots are initial ones.
        """
        keys, known, kept = self._keys, self._known, self._kept
        self._keys, self._known, self._kept = keys[:0], {}, kept[:0]
        self.restored = True
        self._rows.replace(keys, known, kept)
        source = f" of '{self.source}'"
        self._rows.warn(self._rows.room.left_out(keys, kept, source))
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
        there = sibling(key, KEYS)
        for start, size in blocks(reader.shapes[key], tf.float32):
            keys = np.arange(start, start + size)
            if there in reader.shapes:
                keys = reader.read_rows(there, start, size).numpy()
            self._rows.write_for(name, keys, reader.read_rows(key, start, size))

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
            for shard in self._rows.shards:
                shard.set_known(
                    last_used=shard.live().last_used + later,
                    candidates=shard.integers(CANDIDATES)
                    + np.array([0, 0, later]),
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
