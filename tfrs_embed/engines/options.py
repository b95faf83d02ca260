"""The arguments of engines."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.sparsecore.stacking import Groups


@dataclasses.dataclass(frozen=True)
class EngineOptions:
    """The arguments of an engine.

    Attributes:
        features: the features, in the order of each call's bags.
        optimizers: each table's optimizer by name; None: it is not trained.
        strategy: the strategy under which the tables are made.
        name: the owner of the tables, for errors.
        pipelined: whether SparseCores overlap updates with the next step.
        device: the device of one-device tables; None: TensorFlow's choice.
        batch_size: the largest batch of a TPU's replica, or None.
        sparse_core_config: a `SparseCoreEmbeddingConfig`, or None.
        stacking: the tables that SparseCores hold as one; None: TensorFlow's
            choice.
        communication_dtype: the name of the dtype that rows, vectors and
            gradients have between replicas.
    """

    features: Sequence[FeatureSpec]
    optimizers: Mapping[str, TableOptimizer | None]
    strategy: tf.distribute.Strategy
    name: str
    pipelined: bool = False
    device: str | None = None
    batch_size: int | None = None
    sparse_core_config: Any = None
    stacking: Groups | None = None
    communication_dtype: str = "float32"
