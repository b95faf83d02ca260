"""The number of updates, kept by all parts of an engine, as one variable."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.unmirrored import UnmirroredVariable
from tfrs_embed.storage.composite import CompositeVariable


class CompositeStep(CompositeVariable):
    """The number of updates, of which every part of an engine has a copy."""

    dtype = tf.int64
    shape = tf.TensorShape(())
    name = "step:0"

    def numpy(self) -> np.int64:
        return self._variables[0].numpy()

    def __int__(self) -> int:
        return int(self.numpy())

    def assign(self, value: Any) -> None:
        """Sets the number in all parts."""
        for step in self._variables:
            step.assign(tf.cast(value, tf.int64))

    def read(self) -> tf.Tensor:
        return tf.convert_to_tensor(self._variables[0])

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        # For asynchronous checkpoints.
        if self not in object_map:
            with tf.init_scope(), tf.device("CPU:0"):
                object_map[self] = UnmirroredVariable(self.numpy())
        object_map[self].assign(self.read())
