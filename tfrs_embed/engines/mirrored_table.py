"""A table that each replica has a copy of, seen as one."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfrs_embed.engines.whole import WholeTable


class MirroredTable(WholeTable):
    """A table, or a slot, of which this process's replicas have a copy each.

    All copies are equal, so reading it takes one of this process, whatever the
    other workers do.
    """

    def numpy(self) -> np.ndarray:
        """The whole table, [vocabulary_size, dim] float32."""
        return self._variables[0].numpy()

    def _write(self, value: tf.Tensor) -> None:
        for copy in self._variables:
            with tf.device(copy.device):
                copy.assign(value)
