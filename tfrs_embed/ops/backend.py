"""The operations that a step is made of: TensorFlow's, or the kernels'."""

from __future__ import annotations

import contextvars
from typing import Any

import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.compat.strategies import in_xla, refuse_in_xla
from tfrs_embed.ops.compiled import CompiledOperations, Portable
from tfrs_embed.ops.stock import Stock

#: What layers and retrieval look ids up in while an export is traced, or None.
SERVED_TABLES: contextvars.ContextVar[Any] = contextvars.ContextVar(
    "served_tables", default=None
)

_STOCK = Stock()


def operations(device: str | None, training: bool) -> Stock:
    """Returns the fastest allowed operations; all give the same numbers.

    Args:
        device: the rows' device; None or empty: TensorFlow chooses.
        training: whether this is part of a training step. Other graphs may be
            exported to machines without kernels.

    Raises:
        NotImplementedError: an exported model's inside of
            `tf.function(jit_compile=True)`.
    """
    served = SERVED_TABLES.get() is not None
    if in_xla():
        if served:
            refuse_in_xla("Lookups of exported models")
        # `ops.xla` imports modules that import this one.
        from tfrs_embed.ops.xla import Xla

        return Xla()
    module = kernels.operations(device, served)
    if served and not training:
        return Portable(module)
    if module is None:
        return _STOCK
    if training or tf.executing_eagerly():
        return CompiledOperations(module)
    return Portable(module)
