"""Which keys of a shard get and lose rows, for the texts of a table's keys."""

from __future__ import annotations

import weakref

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.unmirrored import make_variable
from tfrs_embed.storage.key_table import KeyTable
from tfrs_embed.storage.key_texts import KeyTexts


class ShardTexts:
    """Tells the texts of a table which keys of a shard get and lose rows.

    Args:
        texts: the texts of the table.
        key_table: the shard's keys; it has none yet.
        spills: whether keys that a step evicts go to a spill, and keep their
            texts.
    """

    def __init__(
        self, texts: KeyTexts, key_table: KeyTable, spills: bool
    ) -> None:
        self._texts = texts
        self._key_table = key_table
        self._spills = spills
        # What `take_removed` returns next; None: nobody asks for it.
        self._noted: list[np.ndarray] | None = None
        self._missed = False
        if not spills:
            key_table.take_removed()  # They are noted from now on.
        with tf.device(key_table.host):
            self._notes = make_variable(tf.constant(0, tf.int64), "texts")

    def note(self, keys: tf.Tensor, step: tf.Tensor, reserved: bool) -> None:
        """Tells the texts which keys a step gives rows, or reserves rows for.

        Keys are [n] int64; `step` begins with the step's number.
        """
        this = weakref.ref(self)

        def call(keys: np.ndarray, step: np.ndarray) -> np.ndarray:
            # Graphs may outlive the table.
            shard = this()
            if shard is not None:
                if reserved:
                    shard._texts.reserve(keys, int(step.ravel()[0]))
                else:
                    shard._texts.admit(keys, shard.take_gone())
            return np.int64(1)

        with tf.device(self._key_table.host):
            # As in `plain_keys.run`: ordered by a variable of this shard alone.
            made = tf.numpy_function(
                call, [keys, step], tf.int64, stateful=False
            )
            self._notes.assign_add(tf.ensure_shape(made, []))

    def take_gone(self) -> list[int]:
        """Returns keys that have lost their rows, and so their texts.

        Whatever gives keys rows takes these first: they may be among them.
        """
        if self._spills:
            return []
        keys = self._key_table.take_removed()
        # A table can't lose more keys than it has room for in between.
        assert keys is not None
        if self._noted is not None and len(keys):
            self._noted.append(keys)
            numbers = self._key_table.numbers()
            most = 2 * (numbers.size + numbers.capacity)
            if sum(map(len, self._noted)) > most:
                self._noted, self._missed = [], True
        return keys.tolist()

    def take_removed(self) -> np.ndarray | None:
        """Does what `KeyTable.take_removed` does."""
        if self._spills:
            return self._key_table.take_removed()
        self._texts.drop(self.take_gone())
        noted, missed = self._noted or [], self._missed
        self._noted, self._missed = [], False
        if missed:
            return None
        return np.concatenate([np.zeros([0], np.int64), *noted])
