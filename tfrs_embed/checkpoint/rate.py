"""A table's learning rate in a checkpoint."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import numpy as np

from tfrs_embed.checkpoint.bundle import BundleReader, TensorSlice
from tfrs_embed.checkpoint.names import in_delta, sibling
from tfrs_embed.checkpoint.rows import CheckpointValue, Save
from tfrs_embed.checkpoint.value_copies import copy_for_saving
from tfrs_embed.compat.private_tensorflow import Trackable
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import RULES, TableOptimizer

#: The name of a table's rate in a checkpoint.
LEARNING_RATE = "learning_rate"
_SLOTS = {slot for rule in RULES for slot in rule().slots()}


class SavedRate(Trackable, CheckpointValue):
    """Saves and restores the learning rate of a table's optimizer.

    A rate that a schedule or a callable computes is neither saved nor restored.
    Nor is a rate restored that was saved with slots of another rule.
    """

    optional = True

    def __init__(self, name: str, optimizer: TableOptimizer) -> None:
        self.name = name
        self._optimizer = optimizer

    def slices(self, key: str, save: Save) -> Iterable[TensorSlice]:
        variable = self._optimizer.rate.variable
        return [] if variable is None else [TensorSlice(key, variable.numpy())]

    def check(self, key: str, reader: BundleReader) -> None:
        where = f"'{self.name}' can't be restored from '{reader.prefix}'"
        shape, dtype = reader.shapes[key], reader.dtypes[key]
        if shape or not dtype.is_floating:
            raise ValueError(
                f"{where}: it is {dtype.name} of shape {shape} there, not a "
                "number."
            )
        rate = float(reader.read(key))
        if not np.isfinite(rate) or rate < 0:
            raise ValueError(
                f"{where}: it must be finite and >= 0, and is {rate} there."
            )
        if not self._is_of_rule(key, reader):
            return
        rates = reader.rates.setdefault(self._optimizer, {})
        rates[self.name] = rate
        if len(set(rates.values())) > 1:
            raise ValueError(
                f"{where}: these tables share one optimizer here, and have "
                f"learning rates of their own there: {rates}. Give each an "
                "optimizer of its own."
            )

    def restore(self, key: str, reader: BundleReader) -> None:
        if self._optimizer.rate.variable is None:
            return
        if self._is_of_rule(key, reader):
            self._optimizer.rate.assign(float(reader.read(key)))
            return
        rate, rule = self._optimizer.learning_rate, self._optimizer.rule.name
        warnings.warn(
            f"'{self.name}' stays {rate:.6g}: '{reader.prefix}' has the rate "
            f"{float(reader.read(key)):.6g} of another optimizer than {rule}.",
            UserWarning,
            stacklevel=2,
        )

    def _is_of_rule(self, key: str, reader: BundleReader) -> bool:
        """Whether a rate was saved with the slots of the optimizer's rule."""
        for name_of in sibling, in_delta:
            if name_of(key, PARAMETERS) in reader.shapes:
                saved = {s for s in _SLOTS if name_of(key, s) in reader.shapes}
                return saved == set(self._optimizer.rule.slots())
        # No row has changed.
        return True

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        copy_for_saving(self, object_map)
