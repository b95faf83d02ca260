"""The number of updates, counted by all parts of an engine, as one variable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.unmirrored import UnmirroredVariable
from tfrs_embed.storage.composite import CompositeVariable


class CompositeStep(CompositeVariable):
    """The number of updates made, seen as one variable.

    Restoring it drops deferred updates, as a one-device engine's step does.

    Args:
        steps: each part's step: a variable, or an object like one.
        strategy: the strategy they were made under.
        drop_deferred: drops the updates that pipelining has deferred.
    """

    dtype = tf.int64
    shape = tf.TensorShape(())
    name = "step:0"

    def __init__(
        self,
        steps: Sequence[Any],
        strategy: tf.distribute.Strategy,
        drop_deferred: Callable[[], None],
    ) -> None:
        super().__init__(steps, strategy)
        self._drop_deferred = drop_deferred

    def numpy(self) -> np.int64:
        """The number."""
        return self._variables[0].numpy()

    def __int__(self) -> int:
        """The number, as Python has it."""
        return int(self.numpy())

    def assign(self, value: Any) -> None:
        """Sets the number in all parts."""
        for step in self._variables:
            step.assign(tf.cast(value, tf.int64))

    def read(self) -> tf.Tensor:
        """The number, a scalar tensor."""
        return tf.convert_to_tensor(self._variables[0])

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        # For checkpoints that are written while the training goes on.
        if self not in object_map:
            with tf.init_scope(), tf.device("CPU:0"):
                object_map[self] = UnmirroredVariable(self.numpy())
        object_map[self].assign(self.read())

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        self._drop_deferred()
        super()._restore_from_tensors(restored_tensors)
