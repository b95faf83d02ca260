"""Converts configurations to those of TensorFlow's TPU embedding classes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import tpu_embedding_v2_utils
from tfrs_embed.configs.tables import FeatureConfig, FeatureSpec, by_optimizer
from tfrs_embed.optimizers.conversion import convert, require_tpu, to_tpu
from tfrs_embed.optimizers.rules import SGD, TableOptimizer
from tfrs_embed.sparsecore.stacking import Groups

_tpu = tf.tpu.experimental.embedding


def feature_configs(
    features: Sequence[FeatureSpec],
    samples: Sequence[int | None],
    optimizers: Mapping[str, Any],
) -> list[Any]:
    """Returns a `tf.tpu.experimental.embedding.FeatureConfig` per feature.

    `samples` has each feature's samples in a replica's batch, or None if its
    output_shape has them; `optimizers` are TensorFlow's by table name.
    TensorFlow initializes the tables with zeros; the caller writes initial
    values.
    """
    tables = {
        table.name: _tpu.TableConfig(
            vocabulary_size=table.vocabulary_size,
            dim=table.dim,
            initializer=_zeros,
            optimizer=optimizers[table.name],
            combiner=table.combiner,
            name=table.name,
        )
        for table in (feature.table for feature in features)
    }
    return [
        _tpu.FeatureConfig(
            table=tables[feature.table.name],
            output_shape=feature.output_shape if count is None else [count],
            name=feature.name,
        )
        for feature, count in zip(features, samples, strict=True)
    ]


def _zeros(
    shape: Any, dtype: tf.DType, shard_info: Any = None, **_: Any
) -> tf.Tensor:
    # With `shard_info` in the signature TensorFlow asks for one shard at a
    # time; otherwise it makes the whole table for each shard.
    return tf.zeros(shape if shard_info is None else shard_info.shape, dtype)


def layer_optimizers(
    optimizers: Mapping[str, TableOptimizer | None],
    rate: Callable[[TableOptimizer], Any],
    stacking: Groups | None = None,
) -> dict[str, Any]:
    """Returns TensorFlow's optimizers of a layer's tables, by table name.

    TensorFlow may stack tables of one optimizer. `rate` is called for the
    learning rate at each update; `stacking` has the tables that may be stacked,
    None: all of one optimizer.
    """
    made: dict[Any, Any] = {}
    of_table = {}
    for name, optimizer in optimizers.items():
        group: Any = None
        if stacking is not None:
            group = next((each for each in stacking if name in each), name)
        key = (id(optimizer), group)
        if key not in made:
            # TensorFlow needs an optimizer for untrained tables too; their
            # gradients are never sent. It compares partials by identity, so
            # tables of two equal optimizers don't become one stack.
            where = f"Table '{name}'"
            made[key] = (
                to_tpu(SGD(), 0.0, where)
                if optimizer is None
                else to_tpu(
                    optimizer.rule,
                    functools.partial(rate, optimizer),
                    where,
                    optimizer.options.clipvalue,
                )
            )
        of_table[name] = made[key]
    return of_table


def declares_samples(feature: FeatureSpec) -> bool:
    """Whether a feature's configuration determines its number of samples.

    TensorFlow's FeatureConfig with an output_shape does. Otherwise a layer
    takes the number from its batches.
    """
    shape = feature.output_shape
    return (
        not isinstance(feature.source, FeatureConfig)
        and shape is not None
        and None not in shape
        and not feature.max_sequence_length
    )


def untrained_optimizers(
    features: Sequence[FeatureSpec], optimizer: Any
) -> dict[str, Any]:
    """Returns TensorFlow's optimizers of tables that are only laid out.

    They decide which tables TensorFlow stacks. `optimizer`, for tables that
    have none, is TensorFlow's or an argument of `conversion.convert`.
    """
    tables = {feature.table.name: feature.table for feature in features}
    of_table: dict[str, Any] = {}
    for group in by_optimizer(tables.values(), optimizer):
        given, where = group[0].optimizer, f"Table '{group[0].name}'"
        given = optimizer if given is None else given
        if not isinstance(given, tpu_embedding_v2_utils._Optimizer):
            converted = convert(given, where)
            if converted is not None:
                require_tpu(converted, where)
                # TensorFlow does not stack tables whose learning rates are
                # different callables, as the rates of a layer's optimizers are.
                given = to_tpu(converted.rule, lambda: 0.0, where)
        of_table |= dict.fromkeys([table.name for table in group], given)
    return of_table
