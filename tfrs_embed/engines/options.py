"""The arguments that a layer's engines have in common."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfrs_embed.sparsecore.stacking import Groups


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """The arguments of an engine, besides its features and optimizers.

    Attributes:
        strategy: the strategy that the tables are made under.
        name: whose tables these are, for errors.
        pipelined: whether updates overlap the next step, as on SparseCore:
            lookup i sees the updates of steps 0 to i - 2, and the update of
            step i - 1 runs beside the dense part of step i.
        device: where the tables of a single device live; None: where
            TensorFlow places them.
        batch_size: the largest batch of a TPU's replica, or None.
        sparse_core_config: a `SparseCoreEmbeddingConfig`, or None.
        stacking: which tables SparseCores hold as one; None: TensorFlow's
            choice.
        communication_dtype: the name of the dtype that rows, vectors and
            gradients have between replicas.
    """

    strategy: tf.distribute.Strategy
    name: str
    pipelined: bool = False
    device: str | None = None
    batch_size: int | None = None
    sparse_core_config: Any = None
    stacking: Groups | None = None
    communication_dtype: str = "float32"
