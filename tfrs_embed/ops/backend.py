"""The operations that a step is made of: TensorFlow's, or the kernels'."""

from __future__ import annotations

import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.ops.compiled import Compiled, Portable
from tfrs_embed.ops.stock import Stock

_STOCK = Stock()


def of(device: str | None, training: bool) -> Stock:
    """The fastest operations that may be used; all give the same numbers.

    Args:
        device: where the rows are; None or empty: where TensorFlow places them.
        training: whether the operations are part of a training step. A graph
            that isn't may be exported, to where there are no kernels.
    """
    module = kernels.operations(device)
    if module is None:
        return _STOCK
    if training or tf.executing_eagerly():
        return Compiled(module)
    return Portable(module)
