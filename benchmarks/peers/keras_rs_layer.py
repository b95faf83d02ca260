"""keras_rs's layer, whatever its backend."""

import cases
import keras_rs
import numpy as np


def row_values(shape, dtype=None):
    """An initializer."""
    rows = cases.row_values(np.arange(shape[0])).astype(dtype or np.float32)
    return np.broadcast_to(rows[:, None], shape)


def make_layer(case):
    tables = [
        keras_rs.layers.TableConfig(
            f"table_{i}",
            table.rows,
            table.dim,
            initializer=row_values,
            combiner="sum",
        )
        for i, table in enumerate(case.tables)
    ]
    layer = keras_rs.layers.DistributedEmbedding(
        [
            keras_rs.layers.FeatureConfig(
                f"feature_{i}",
                tables[f.table],
                input_shape=(case.batch, f.hotness),
                output_shape=(case.batch, tables[f.table].embedding_dim),
            )
            for i, f in enumerate(case.features)
        ]
    )
    layer.build([(case.batch, f.hotness) for f in case.features])
    return layer
