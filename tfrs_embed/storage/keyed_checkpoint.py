"""The keys of a table that a checkpoint restores."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np

from tfrs_embed.checkpoint import growth
from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.names import sibling
from tfrs_embed.checkpoint.rows import CANDIDATES, LAST_USED
from tfrs_embed.storage.table_keys import COUNTERS, TableKeys, checked_integers


class KeyedCheckpoint:
    """Keys and counters to restore into a table.

    A restore first reads and checks keys, counters and candidates, then
    replaces all keys. Rows and slots follow in `KeyedVariable`. `step` is the
    engine's number of updates.

    Attributes:
        source: the checkpoint from which new keys were last read.
        num_new_keys: the number of these keys.
    """

    def __init__(self, rows: TableKeys, step: Any) -> None:
        self.source: str | None = None
        self.num_new_keys = 0
        self._rows = rows
        self._step = step
        # Keys that were read and not yet restored, in the checkpoint's order,
        # with counters and candidates by name.
        self._new: tuple[np.ndarray, dict[str, np.ndarray]] | None = None
        # The largest restored step of last use, until `count_from_step`.
        self._newest = 0
        self._has_step = False

    def read_keys(self, key: str, reader: BundleReader) -> None:
        """Reads keys, counters and candidates, for `restore_keys`.

        Raises:
            ValueError: the keys are invalid, or a shard has no room for its
                own.
        """
        keys = reader.read(key).numpy()
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
                    name, reader.read(there).numpy(), len(keys), where
                )
        self._take(keys, known, reader.prefix)

    def read_numbers(self, rows: int, prefix: str) -> None:
        """Takes the row numbers of a table without keys as keys."""
        self._take(np.arange(rows, dtype=np.int64), {}, prefix)

    def _take(
        self, keys: np.ndarray, known: dict[str, np.ndarray], prefix: str
    ) -> None:
        room = self._rows.room
        evicts = room.evicts and LAST_USED in known
        if not evicts and not growth.may_shrink():
            room.require(keys)
        self._new = keys, known
        self.source, self.num_new_keys = prefix, len(keys)

    def restore_keys(self) -> None:
        """Replaces all keys by the last read, once; resets rows and slots."""
        if self._new is None:
            return
        keys, known = self._new
        self._new = None
        kept = self._rows.replace(keys, known)
        chief = self._rows.replicas.worker == 0
        if chief and not kept.all() and not growth.may_shrink():
            text = self._rows.room.left_out(keys, kept, str(self.source))
            warnings.warn(text, UserWarning, stacklevel=2)
        seen = known.get(LAST_USED, np.zeros([0], np.int64))
        if CANDIDATES in known:
            seen = np.append(seen, known[CANDIDATES][:, 2])
        self._newest = int(seen.max(initial=0))
        if self._has_step:
            self.count_from_step()

    def count_from_step(self) -> None:
        """Shifts restored steps of last use back, to this layer's step.

        A table that is restored without its layer keeps its new layer's step,
        which may be smaller. Call it after the step was restored, if one is.
        """
        self._has_step = True
        later = min(0, int(np.asarray(self._step)) - self._newest)
        self._newest = 0
        if later == 0:
            return
        for shard in self._rows.shards:
            shard.set_known(
                last_used=shard.live().last_used + later,
                candidates=shard.integers(CANDIDATES) + np.array([0, 0, later]),
            )
