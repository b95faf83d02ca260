"""Small tables, which Keras layers hold and the model's optimizer trains."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.layers.embedding import Embedding
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
