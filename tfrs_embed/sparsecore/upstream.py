"""Configurations as TensorFlow's TPU embedding classes take them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs import FeatureSpec, TableSpec
from tfrs_embed.optimizers import (
    FTRL,
    SGD,
    Adagrad,
    AdagradMomentum,
    Adam,
    TableOptimizer,
    UpdateRule,
)
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

    Tables are initialized with zeros: whoever uses them fills them in.

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
            made[key] = _optimizer(optimizer, rate)
        of_table[name] = made[key]
    tables: dict[str, Any] = {}
    configs = []
    for feature, count in zip(features, samples, strict=True):
        table = feature.table
        if table.name not in tables:
            tables[table.name] = _table(table, of_table[table.name])
        configs.append(
            _tpu.FeatureConfig(
                table=tables[table.name],
                output_shape=[count],
                name=feature.name,
            )
        )
    return configs


def _table(table: TableSpec, optimizer: Any) -> Any:
    return _tpu.TableConfig(
        vocabulary_size=table.vocabulary_size,
        dim=table.dim,
        initializer=_zeros,
        optimizer=optimizer,
        combiner=table.combiner,
        name=table.name,
    )


def _zeros(
    shape: Any, dtype: tf.DType, shard_info: Any = None, **_: Any
) -> tf.Tensor:
    # TensorFlow reads off the signature that it may ask for a shard's rows
    # alone; else it makes the whole table for each of them.
    return tf.zeros(shape if shard_info is None else shard_info.shape, dtype)


def _optimizer(optimizer: TableOptimizer | None, rate: Rate | None) -> Any:
    # An untrained table's gradients are never sent; TF wants an optimizer.
    if optimizer is None:
        return rule_to_tpu(SGD(), 0.0)
    # Tables of two optimizers must not become one stack, not even if these
    # are equal now. TensorFlow compares callables by identity.
    return rule_to_tpu(optimizer.rule, lambda: rate(optimizer) if rate else 0.0)


def rule_to_tpu(rule: UpdateRule, rate: Any) -> Any:
    """Returns TensorFlow's optimizer of an update rule.

    Args:
        rule: the rule.
        rate: its learning rate: a number, or a callable.

    Returns:
        A `tf.tpu.experimental.embedding` optimizer.
    """
    optimizer = _make(rule, rate)
    # TensorFlow's default is False, which recent versions of protobuf refuse
    # where an enumeration's number belongs.
    if getattr(optimizer, "low_dimensional_packing_status", None) is False:
        optimizer.low_dimensional_packing_status = 0
    return optimizer


def _make(rule: UpdateRule, rate: Any) -> Any:
    if isinstance(rule, SGD):
        return _tpu.SGD(rate)
    if isinstance(rule, Adagrad):
        return _tpu.Adagrad(
            rate, initial_accumulator_value=rule.initial_accumulator_value
        )
    if isinstance(rule, AdagradMomentum):
        return _tpu.AdagradMomentum(
            rate,
            momentum=rule.momentum,
            use_nesterov=rule.use_nesterov,
            exponent=rule.exponent,
            beta2=rule.beta2,
            epsilon=rule.epsilon,
        )
    if isinstance(rule, Adam):
        return _tpu.Adam(
            rate,
            beta_1=rule.beta_1,
            beta_2=rule.beta_2,
            epsilon=rule.epsilon,
            sum_inside_sqrt=rule.sum_inside_sqrt,
        )
    assert isinstance(rule, FTRL)
    return _tpu.FTRL(
        rate,
        learning_rate_power=rule.learning_rate_power,
        l1_regularization_strength=rule.l1_regularization_strength,
        l2_regularization_strength=rule.l2_regularization_strength,
        beta=rule.beta,
        initial_accumulator_value=rule.initial_accumulator_value,
        multiply_linear_by_learning_rate=rule.multiply_linear_by_learning_rate,
    )
