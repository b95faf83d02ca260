"""SparseCores' host preprocessing for a TensorFlow without kernels for it.

TensorFlow's wheel for TPUs has kernels that run on any machine. For other
wheels these numpy functions return the same bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import tpu_embedding_v3
from tfrs_embed.ops.checks import Checks, first, message
from tfrs_embed.sparsecore.coo import Ids
from tfrs_embed.sparsecore.host_buffers import (
    Enqueued,
    fill_buffers,
    needed_limits,
)
from tfrs_embed.sparsecore.layout import Layout
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
    """Fills a chip's buffers, as `TPUEmbeddingV2._preprocess_features` does.

    Args:
        embedding: TensorFlow's TPUEmbeddingV2.
        num_replicas_in_sync: the number of chips.
        num_sc_per_chip: SparseCores per chip.
        max_ids_per_chip_per_sample: a buffer's capacity, in ids per sample.
        flat_features: each feature's path and FeatureConfig.
        flat_inputs: each feature's Tensor, RaggedTensor or SparseTensor.
        flat_weights: each feature's weights of the same kind, or None.

    Raises:
        ValueError: an input is of another kind.
        tf.errors.InvalidArgumentError: inputs don't fit together, or there are
            more ids than a limit allows.
    """
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
    checks = Checks()
    ids = by_sample(layout, flat_inputs, flat_weights, checks)
    return fill_buffers(layout, ids, 1, checks)


def statistics(
    features: Any,
    feature_config: Any,
    num_tpu_chips: int,
    num_sc_per_chip: int = 4,
    optimizer: Any = None,
    sparse_core_embedding_config: Any = None,
) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
    """Counts the limits a batch needs, as `compute_sparse_core_stats` does."""
    # Optimizers decide what is stacked.
    feature_config = tpu_embedding_v3._clone_feature_config(feature_config)
    for feature in tf.nest.flatten(feature_config):
        feature.table.optimizer = feature.table.optimizer or optimizer
    layout = Layout(
        feature_config,
        Topology.of((num_tpu_chips, num_sc_per_chip)),
        sparse_core_embedding_config,
    )
    checks = Checks()
    flat = tf.nest.flatten(features)
    ids = by_sample(layout, flat, [None] * len(flat), checks)
    return needed_limits(layout, ids, checks)


def by_sample(
    layout: Layout,
    inputs: Sequence[Any],
    weights: Sequence[Any],
    checks: Checks,
) -> list[Ids]:
    """Groups ids and weights by sample; errors have the kernels' texts.

    Raises:
        ValueError: an input is neither a Tensor, a RaggedTensor nor a
            SparseTensor, or weights are of another kind than ids.
    """
    cores = layout.topology.sparse_cores
    ids = []
    for given, weight, feature in zip(
        inputs, weights, layout.features, strict=True
    ):
        if feature.samples % cores:
            raise ValueError(
                f"sample_count {feature.samples} is not divisible by the "
                f"number of SparseCores per chip {cores}."
            )
        if weight is not None and type(weight) is not type(given):
            raise ValueError(
                f"Expect weight to be {type(given).__name__} type but got "
                f"{type(weight)}"
            )
        splits, values = _grouped(given, feature.samples, checks)
        if isinstance(weight, tf.Tensor):
            weight = tf.reshape(weight, [-1])
        elif weight is not None:
            weight = weight.values
        if weight is not None:
            size, weights_size = tf.size(values), tf.size(weight)
            _require(
                checks,
                tf.equal(size, weights_size),
                "Values and weights should have same elements. But got ",
                size,
                " elements for values and ",
                weights_size,
                " elements for weights.",
            )
        ids.append(Ids(splits, values, weight))
    return ids


def _grouped(
    given: Any, samples: int, checks: Checks
) -> tuple[tf.Tensor, tf.Tensor]:
    """A feature's splits by sample, and its ids."""
    all_samples = tf.range(samples + 1)
    if isinstance(given, tf.Tensor):
        values = tf.reshape(given, [-1])
        size = tf.size(values)
        _require(
            checks,
            tf.equal(size, 0) | tf.equal(size, samples),
            "Dense tensor input should have values elements number the same as "
            "the sample count. But got ",
            size,
            f" elements for values and sample count as {samples}.",
        )
        return tf.minimum(all_samples, size), values
    if isinstance(given, tf.RaggedTensor):
        rows = tf.size(given.row_splits)
        _require(
            checks,
            tf.equal(rows, samples + 1),
            "Ragged tensor input should have row_splits elements number the "
            "same as the sample count + 1. But got ",
            rows,
            f" elements for row_splits and sample count as {samples}.",
        )
        return given.row_splits, given.values
    if not isinstance(given, tf.SparseTensor):
        raise ValueError(
            f"Input of unknown type {type(given)}. Please only pass Tensor, "
            "SparseTensor or RaggedTensor as input to embedding lookup."
        )
    row = tf.cast(given.indices[:, 0], tf.int32)
    of_sparse = "Invalid indices_or_row_splits input, indices of SparseTensor "
    _require(
        checks,
        tf.reduce_all(row[1:] >= row[:-1]) & tf.reduce_all(row >= 0),
        of_sparse + "need to be sorted in ascending (non-decreasing) order.",
    )
    beyond = row >= samples
    _require(
        checks,
        ~tf.reduce_any(beyond),
        of_sparse + "contained a row_id ",
        first(row, beyond),
        f" that was >= the sample count ({samples}).",
    )
    return tf.searchsorted(row, all_samples), given.values


def _require(checks: Checks, ok: tf.Tensor, *parts: Any) -> None:
    checks.require(ok, lambda: message(*parts))
