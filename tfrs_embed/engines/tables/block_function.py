"""Functions that bring blocks of a table's rows from other workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

#: Rows come from other workers in blocks of this many float32 numbers.
BLOCK_ELEMENTS = 1 << 22


class BlockFunction:
    """A function of the first row of a block, in a graph of its own.

    TensorFlow warns of a tf.function that is traced for each table.

    Args:
        function: takes the first row, a scalar int32.
    """

    def __init__(self, function: Callable[[tf.Tensor], Any]) -> None:
        self._function = function
        self._concrete: Any = None

    def __call__(self, start: int) -> Any:
        if self._concrete is None:
            self._concrete = tf.function(
                self._function, autograph=False
            ).get_concrete_function(tf.TensorSpec([], tf.int32))
        return self._concrete(tf.constant(start))
