"""TensorFlow's own host preprocessing for SparseCores, without a TPU.

The tensorflow-tpu wheel has the kernels, which run on any machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.sparsecore.host_buffers import Enqueued
from tfrs_embed.sparsecore.layout import Layout


def preprocess(
    layout: Layout, inputs: Sequence[Any], weights: Sequence[Any]
) -> Enqueued:
    """Fills one chip's buffers; each feature's weights are float32 or None."""
    topology, stacking = layout.topology, layout.stacking
    return _Preprocessing(layout)._preprocess_features(
        num_replicas_in_sync=topology.chips,
        max_ids_per_chip_per_sample=layout.config.max_ids_per_chip_per_sample,
        max_minibatches_per_sc=64,
        num_sc_per_chip=topology.sparse_cores,
        num_sc_shards=topology.shards,
        stacked_table_to_tables=stacking.stacked_table_to_tables,
        table_to_stacked_table_offset=stacking.table_to_stacked_table_offset,
        table_to_sample_count=stacking.table_to_sample_count,
        feature_to_sample_offset=stacking.feature_to_sample_offset,
        flat_features=[(f.path, f.config) for f in layout.features],
        flat_inputs=inputs,
        flat_weights=weights,
    )


class _Preprocessing(tf.tpu.experimental.embedding.TPUEmbeddingV2):
    """TensorFlow's class with only the attributes that preprocessing reads."""

    def __init__(self, layout: Layout) -> None:
        stacks = layout.stacks
        # Past tf.Module's tracking, which would wrap the dicts.
        self.__dict__.update(
            _sparse_core_embedding_config=layout.config,
            _table_to_max_ids_per_sparse_core={
                name: stack.max_ids for name, stack in stacks.items()
            },
            _table_to_max_unique_ids_per_sparse_core={
                name: stack.max_unique_ids for name, stack in stacks.items()
            },
        )
