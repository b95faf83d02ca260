"""Copies of values for checkpoints that are written while training goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.rows import CheckpointValue, run_in_place
from tfrs_embed.checkpoint.session import Session
from tfrs_embed.compat.private_tensorflow import Trackable


def copy_for_saving(
    saved: CheckpointValue,
    object_map: Any,
    read: Callable[[], np.ndarray | None],
) -> None:
    """Copies a value that TensorFlow is about to save, or updates the copy.

    `read` returns the value, or None if nothing is to be saved. `object_map`
    has TensorFlow's copies by their originals.
    """
    if saved not in object_map:
        object_map[saved] = _ValueCopy(saved, read)
    run_in_place(object_map[saved].refresh)


class _ValueCopy(Trackable, CheckpointValue):
    """A copy of a value; restores write the original."""

    def __init__(
        self, saved: CheckpointValue, read: Callable[[], np.ndarray | None]
    ) -> None:
        self.name = saved.name
        self.order = saved.order
        self.optional = saved.optional
        self._saved = saved
        self._read = read
        self._value: np.ndarray | None = None

    def refresh(self) -> None:
        """Copies the value."""
        self._value = self._read()

    @property
    def nbytes(self) -> int:
        return 0 if self._value is None else self._value.nbytes

    def save(self, key: str, session: Session) -> None:
        if self._value is None:
            return
        with tf.device("CPU:0"):
            value = tf.constant(self._value)
        writer = session.writer()
        write = writer.add_blocks if value.shape.rank else writer.add
        write(key, value)

    def check(self, key: str, reader: BundleReader) -> None:
        self._saved.check(key, reader)

    def restore(self, key: str, reader: BundleReader) -> None:
        self._saved.restore(key, reader)
