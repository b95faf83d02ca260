"""Configurations as TensorFlow's TPU embedding classes take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed._tensorflow import tpu_embedding_v2_utils
from tfrs_embed.configs import FeatureConfig, FeatureSpec
from tfrs_embed.optimizers.conversion import convert, require_tpu, to_tpu
from tfrs_embed.optimizers.rules import SGD, TableOptimizer
from tfrs_embed.sparsecore.stacking import Stacking

_tpu = tf.tpu.experimental.embedding

#: Gives the learning rate of a table optimizer.
Rate = Callable[[TableOptimizer], Any]


def feature_configs(
    features: Sequence[FeatureSpec],
    samples: Sequence[int],
    optimizers: Mapping[str, TableOptimizer | None],
    rate: Rate | None = None,
    stacking: Stacking | None = None,
) -> list[Any]:
    """Returns a `tf.tpu.experimental.embedding.FeatureConfig` per feature.

    Tables are initialized with zeros: the caller fills them in.

    Args:
        features: the features.
        samples: each feature's number of samples in one replica's batch; its
            output_shape is [samples].
        optimizers: each table's optimizer by its name. TensorFlow stacks tables
            whose optimizers are equal, so tables of one optimizer get one.
        rate: called for the learning rate at each update; None: the
            configurations are not for training.
        stacking: which tables may be stacked; None: all of one optimizer.

    Returns:
        The configurations, in the order of the features.
    """
    made: dict[Any, Any] = {}
    of_table = {}
    for name, optimizer in optimizers.items():
        key = (id(optimizer), stacking and stacking.group_of(name))
        if key not in made:
            made[key] = _optimizer(optimizer, rate, f"Table '{name}'")
        of_table[name] = made[key]
    return _configs(features, [[count] for count in samples], of_table)


def _configs(
    features: Sequence[FeatureSpec],
    shapes: Sequence[Any],
    optimizers: Mapping[str, Any],
) -> list[Any]:
    """The features with these output_shapes, and TF's optimizers by table."""
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
            output_shape=shape,
            name=feature.name,
        )
        for feature, shape in zip(features, shapes, strict=True)
    ]


def _zeros(
    shape: Any, dtype: tf.DType, shard_info: Any = None, **_: Any
) -> tf.Tensor:
    # TensorFlow reads off the signature that it may ask for a shard's rows
    # alone; else it makes the whole table for each of them.
    return tf.zeros(shape if shard_info is None else shard_info.shape, dtype)


def _optimizer(
    optimizer: TableOptimizer | None, rate: Rate | None, where: str
) -> Any:
    # An untrained table's gradients are never sent; TF wants an optimizer.
    if optimizer is None:
        return to_tpu(SGD(), 0.0, where)
    # Tables of two optimizers must not become one stack, not even if these
    # are equal now. TensorFlow compares callables by identity.
    return to_tpu(
        optimizer.rule,
        lambda: rate(optimizer) if rate else 0.0,
        where,
        optimizer.options.clipvalue,
    )


def declares_samples(feature: FeatureSpec) -> bool:
    """Whether a feature's configuration says how many samples there are.

    TensorFlow's does if it has an output_shape. Otherwise a layer takes the
    number from its batches.
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
            `optimizers.conversion.convert` takes.

    Returns:
        The configurations by the features' names. Their optimizers decide what
        TF stacks, and are not for training.

    Raises:
        ValueError: an optimizer that can't be converted.
        TypeError: another kind of optimizer.
    """
    made: dict[int, Any] = {}
    of_table = {}
    for table in (feature.table for feature in features):
        given = optimizer if table.optimizer is None else table.optimizer
        # Tables that name a rule have one each, as a layer gives them.
        named = isinstance(table.optimizer, str)
        key = id(table) if named else id(given)
        if key not in made:
            made[key] = _chip_optimizer(given, f"Table '{table.name}'")
        of_table[table.name] = made[key]
    shapes = [
        feature.output_shape if count is None else [count]
        for feature, count in zip(features, samples, strict=True)
    ]
    configs = _configs(features, shapes, of_table)
    names = [feature.name for feature in features]
    return dict(zip(names, configs, strict=True))


def _chip_optimizer(given: Any, where: str) -> Any:
    if isinstance(given, tpu_embedding_v2_utils._Optimizer):
        return given
    converted = convert(given, where)
    if converted is None:
        return None
    # TF does not stack tables whose learning rates are different callables,
    # and each optimizer gets its own when it trains.
    require_tpu(converted, where)
    return to_tpu(converted.rule, lambda: 0.0, where)
