"""SparseCores' host preprocessing for a TensorFlow without kernels for it.

TensorFlow's wheel for TPUs has kernels that run on any machine. For other
wheels these numpy functions fill buffers with the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from tfrs_embed.ops.checks import Checks
from tfrs_embed.sparsecore.host_buffers import Enqueued, fill_buffers
from tfrs_embed.sparsecore.layout import Layout
from tfrs_embed.sparsecore.mid_level.inputs import by_sample, parse
from tfrs_embed.sparsecore.setup import check_feature, parse_configs
from tfrs_embed.sparsecore.topology import Topology


def preprocess(
    embedding: Any,
    *,
    num_replicas_in_sync: int,
    num_sc_per_chip: int,
    max_ids_per_chip_per_sample: int,
    flat_features: Sequence[tuple[str, Any]],
    flat_inputs: Sequence[Any],
    flat_weights: Sequence[Any],
    **_: Any,
) -> Enqueued:
    """`TPUEmbeddingV2._preprocess_features`, called with an `embedding`."""
    config = dataclasses.replace(
        embedding._sparse_core_embedding_config,
        max_ids_per_chip_per_sample=max_ids_per_chip_per_sample,
        max_ids_per_table=embedding._table_to_max_ids_per_sparse_core,
        max_unique_ids_per_table=(
            embedding._table_to_max_unique_ids_per_sparse_core
        ),
    )
    layout = Layout(
        [feature for _, feature in flat_features],
        Topology.of((num_replicas_in_sync, num_sc_per_chip)),
        config,
    )
    return fill(layout, flat_inputs, flat_weights)


def fill(
    layout: Layout, inputs: Sequence[Any], weights: Sequence[Any]
) -> Enqueued:
    """Fills a chip's buffers, and lets ids lead outside of their tables.

    An input is a Tensor, a RaggedTensor or a SparseTensor; weights are of the
    same kind, or None.
    """
    features = []
    for feature in parse_configs([f.config for f in layout.features]).features:
        # SparseCores ignore it.
        feature = dataclasses.replace(feature, max_sequence_length=0)
        check_feature(feature, layout.topology)
        features.append(dataclasses.replace(feature, output_shape=None))
    checks = Checks()
    parsed = parse(features, layout, inputs, weights, 1, checks)
    return fill_buffers(layout, by_sample(layout, parsed, 1), 1, checks)
