"""Small tables, which Keras layers hold and the model's optimizer trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.strategies import is_tpu, on_host
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.layers.embedding import Embedding
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.lookup import combine, gather, gather_densely
from tfrs_embed.ops.samples import Matrix
from tfrs_embed.storage.initial_values import initial_blocks


def build(layer: Embedding, table: TableSpec) -> None:
    """Creates a layer's table with the same initial rows as in an engine."""
    given = layer.embeddings_initializer

    def initializer(_: Any, dtype: Any = None, **__: Any) -> tf.Tensor:
        # Fails at once if the table is larger than all memory.
        np.empty([table.vocabulary_size, table.dim], np.float32)
        rows = tf.concat([rows for _, rows in initial_blocks(table)], 0)
        return tf.cast(rows, dtype or tf.float32)

    layer.embeddings_initializer = initializer
    try:
        layer.build(None)
    finally:
        # Keras stores it in SavedModels, which can't contain ours.
        layer.embeddings_initializer = given


def lookup(
    table: Any, bags: BaggedIds, strategy: tf.distribute.Strategy | None
) -> tf.Tensor:
    """Looks bags up in a variable or a tensor, [vocabulary_size, dim].

    Returns [count, dim] float32, or float64 if the table is.
    """
    # Sums of half precision are float32.
    wide = tf.float64 if table.dtype == tf.float64 else tf.float32
    if strategy is not None and is_tpu(strategy) and bags.bag_size != 1:
        # XLA needs a fixed number of ids.
        known = bags.static_count
        count = bags.count if known is None else known
        matrix = on_host(Matrix.of, bags, count)
        return matrix.combine(tf.cast(tf.gather(table, matrix.ids), wide))
    workers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    rows = gather_densely(table, bags.ids) if workers else gather(table, bags)
    return combine(tf.cast(rows, wide), None, bags)
