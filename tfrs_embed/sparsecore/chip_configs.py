"""Configurations for one chip's batch, as TensorFlow's classes take them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.tpu import tpu_embedding_v2_utils

from tfrs_embed.configs import FeatureConfig, FeatureSpec
from tfrs_embed.optimizer_conversion import convert
from tfrs_embed.sparsecore.upstream import rule_to_tpu

_tpu = tf.tpu.experimental.embedding


def declares_samples(feature: FeatureSpec) -> bool:
    """Whether a feature's configuration says what SparseCores are to do.

    TensorFlow's does if it has an output_shape. Anything else leaves it to a
    layer, which goes by its batches.
    """
    shape = feature.output_shape
    return (
        not isinstance(feature.source, FeatureConfig)
        and shape is not None
        and None not in shape
        and not feature.max_sequence_length
    )


def of_one_chip(
    features: Sequence[FeatureSpec],
    samples: Sequence[int | None],
    optimizer: Any,
) -> dict[str, Any]:
    """Returns a `tf.tpu.experimental.embedding.FeatureConfig` per feature.

    Args:
        features: the features.
        samples: each feature's number of samples on a chip; None: it is in the
            feature's output_shape.
        optimizer: for tables that have none: TF's, or what
            `optimizer_conversion.convert` takes.

    Returns:
        The configurations by the features' names. Their optimizers decide what
        TF stacks, and are not for training.

    Raises:
        ValueError: an optimizer that can't be converted.
        TypeError: another kind of optimizer.
    """
    made: dict[int, Any] = {}
    tables: dict[str, Any] = {}
    configs = {}
    for feature, count in zip(features, samples, strict=True):
        table = feature.table
        if table.name not in tables:
            given = table.optimizer
            if given is None:
                given = optimizer
            # Tables that name a rule have one each, as a layer gives them.
            named = isinstance(table.optimizer, str)
            key = id(table) if named else id(given)
            if key not in made:
                made[key] = _optimizer(given, f"Table '{table.name}'")
            tables[table.name] = _tpu.TableConfig(
                table.vocabulary_size,
                table.dim,
                optimizer=made[key],
                combiner=table.combiner,
                name=table.name,
            )
        configs[feature.name] = _tpu.FeatureConfig(
            tables[table.name],
            output_shape=feature.output_shape if count is None else [count],
            name=feature.name,
        )
    return configs


def _optimizer(given: Any, where: str) -> Any:
    if isinstance(given, tpu_embedding_v2_utils._Optimizer):
        return given
    converted = convert(given, where)
    if converted is None:
        return None
    # TF does not stack tables whose learning rates are different callables,
    # and each optimizer gets its own when it trains.
    return rule_to_tpu(converted.rule, lambda: 0.0)
