"""Copies of values for checkpoints that are written while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from tfrs_embed.checkpoint.bundle import BundleReader, TensorSlice, in_slices
from tfrs_embed.checkpoint.rows import CheckpointValue, Save, run_in_place
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

    def slices(self, key: str, save: Save) -> Iterable[TensorSlice]:
        value = self._value
        if value is None:
            return []
        if not value.shape:
            return [TensorSlice(key, value)]
        return in_slices(
            key, value.shape, lambda start, size: value[start : start + size]
        )

    def check(self, key: str, reader: BundleReader) -> None:
        self._saved.check(key, reader)

    def restore(self, key: str, reader: BundleReader) -> None:
        self._saved.restore(key, reader)
