"""Copies of values for checkpoints that are written while training goes on."""

from __future__ import annotations

from typing import Any

from tfrs_embed.checkpoint.bundle import BundleReader, TensorSlice
from tfrs_embed.checkpoint.rows import CheckpointValue, Save, run_in_place
from tfrs_embed.compat.private_tensorflow import Trackable


def copy_for_saving(saved: CheckpointValue, object_map: Any) -> None:
    """Copies a value that TensorFlow is about to save, or updates the copy.

    `object_map` has TensorFlow's copies by their originals.
    """
    if saved not in object_map:
        object_map[saved] = _ValueCopy(saved)
    run_in_place(object_map[saved].refresh)


class _ValueCopy(Trackable, CheckpointValue):
    """A copy of a value; restores write the original."""

    def __init__(self, saved: CheckpointValue) -> None:
        self.name = saved.name
        self.order = saved.order
        self.optional = saved.optional
        self._saved = saved
        self._slices: list[TensorSlice] = []

    def refresh(self) -> None:
        """Copies the value."""
        self._slices = list(self._saved.slices("", Save()))

    @property
    def nbytes(self) -> int:
        return self._saved.nbytes if self._slices else 0

    def slices(self, key: str, save: Save) -> list[TensorSlice]:
        return [each._replace(name=key) for each in self._slices]

    def check(self, key: str, reader: BundleReader) -> None:
        self._saved.check(key, reader)

    def restore(self, key: str, reader: BundleReader) -> None:
        self._saved.restore(key, reader)
