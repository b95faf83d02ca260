"""The keys of a table that a checkpoint restores."""

from __future__ import annotations

import weakref
from collections.abc import MutableMapping
from typing import Any

import numpy as np

from tfrs_embed.checkpoint.bundle import BundleReader, blocks
from tfrs_embed.checkpoint.names import key_of, sibling
from tfrs_embed.checkpoint.rows import CANDIDATES, LAST_USED
from tfrs_embed.checkpoint.session import Session
from tfrs_embed.storage.keyed_rows import COUNTERS, KeyedRows, checked_integers


class KeyedCheckpoint:
    """Keys and counters to restore into a table.

    A restore first reads and checks keys, counters and candidates, then
    replaces all keys. Rows and slots follow in `KeyedVariable`. `step` is the
    engine's number of updates.

    Attributes:
        source: the checkpoint from which new keys were last read.
        num_new_keys: the number of these keys.
        moments: the table's moment when each session began to save it.
    """

    moments: MutableMapping[Session, list[tuple[int, ...]]]

    def __init__(self, rows: KeyedRows, step: Any) -> None:
        self.source: str | None = None
        self.num_new_keys = 0
        self._rows = rows
        self._step = step
        # Keys that were read and not yet restored, in the checkpoint's order,
        # with counters and candidates by name.
        self._new: tuple[np.ndarray, dict[str, np.ndarray]] | None = None
        # The step at which the keys were saved, if known; the largest restored
        # step of last use, until `count_from_step` shifts it; None: no
        # counters.
        self._saved_at: int | None = None
        self._newest: int | None = None
        self._has_step = False
        self.moments = weakref.WeakKeyDictionary()

    def read_keys(self, key: str, reader: BundleReader) -> None:
        """Reads keys, counters and candidates, for `restore_keys`.

        Raises:
            ValueError: the keys are invalid, or a shard has no room for its
                own.
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
        """Takes the row numbers of a table without keys as keys."""
        self._take(np.arange(rows, dtype=np.int64), {}, prefix)

    def _take(
        self, keys: np.ndarray, known: dict[str, np.ndarray], prefix: str
    ) -> None:
        room = self._rows.room
        room.require(keys, evict=LAST_USED in known)
        room.choose(keys, known)  # A user's eviction rule may fail.
        self._new = keys, known
        self.source, self.num_new_keys = prefix, len(keys)

    def restore_keys(self) -> None:
        """Replaces all keys by the last read, once; resets rows and slots."""
        if self._new is None:
            return
        keys, known = self._new
        self._new = None
        kept = self._rows.replace(keys, known)
        source = f" of '{self.source}'"
        self._rows.warn(self._rows.room.left_out(keys, kept, source))
        self._newest = None
        if LAST_USED in known:
            seen = known[LAST_USED]
            if CANDIDATES in known:
                seen = np.append(seen, known[CANDIDATES][:, 2])
            self._newest = int(seen.max()) if seen.size else None
        if self._has_step:
            self.count_from_step()

    def count_from_step(self) -> None:
        """Shifts restored steps of last use to this layer's step.

        A table that is restored without its layer keeps its new layer's step.
        Its keys then were used as many steps ago as when they were saved. Call
        it after the step was restored, if one is.
        """
        self._has_step = True
        newest, self._newest = self._newest, None
        if newest is None:
            return
        step = int(np.asarray(self._step))
        known = step if self._saved_at is None else self._saved_at
        # If no step was saved, no use may be later than this layer's step.
        later = step - max(newest, known)
        if later:
            for shard in self._rows.shards:
                shard.set_known(
                    last_used=shard.live().last_used + later,
                    candidates=shard.integers(CANDIDATES)
                    + np.array([0, 0, later]),
                )


def _step_of(key: str, reader: BundleReader) -> int | None:
    """Returns the step saved with a table's layer, if any.

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
    """Reads a small tensor of a checkpoint."""
    shape, dtype = reader.shapes[key], reader.dtypes[key]
    if shape[0] == 0:
        return np.zeros(shape, dtype.as_numpy_dtype)
    parts = [reader.read_rows(key, *b).numpy() for b in blocks(shape, dtype)]
    return np.concatenate(parts)
