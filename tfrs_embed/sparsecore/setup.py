"""Checks the configuration of a TPUEmbeddingV2 before anything is made.

TensorFlow ignores or misreads many settings that SparseCores don't support.
Here each of them is an error.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.arguments import integer
from tfrs_embed.compat.private_tensorflow import (
    nest,
    tpu_embedding_v2_utils,
    tpu_embedding_v3,
)
from tfrs_embed.compat.strategies import require_sparse_core_api
from tfrs_embed.configs.parsing import parse
from tfrs_embed.configs.structure import Structure
from tfrs_embed.configs.tables import (
    EmbeddingSpec,
    FeatureSpec,
    TableSpec,
    require_float32,
)
from tfrs_embed.optimizers.conversion import (
    TPU_OPTIMIZERS,
    convert,
    require_tpu,
)
from tfrs_embed.optimizers.learning_rate import is_schedule
from tfrs_embed.optimizers.rules import UpdateRule
from tfrs_embed.sparsecore.layout import Layout
from tfrs_embed.sparsecore.topology import Topology

#: SparseCores number a stack's rows by int32.
MAX_ROWS = 2**31 - 1

_tpu = tf.tpu.experimental.embedding
_Optimizer = tpu_embedding_v2_utils._Optimizer


@dataclasses.dataclass(frozen=True, eq=False)
class CheckedConfig:
    """A checked configuration.

    Attributes:
        feature_config: a copy of the configuration; each table has a name, and
            its optimizer.
        layout: tables and features on the topology.
        structure: the nesting of the configuration.
        order: for each feature in the layout's order, the place in the
            structure's.
        features: the features in the layout's order, without output_shape.
        tables: the tables by name.
        rules: each stack's update rule by name; None without an optimizer.
    """

    feature_config: Any
    layout: Layout
    structure: Structure
    order: tuple[int, ...]
    features: tuple[FeatureSpec, ...]
    tables: dict[str, TableSpec]
    rules: dict[str, UpdateRule | None]

    def flatten(self, value: Any, what: str) -> list[Any]:
        """Returns an input's leaves in the layout's order; `what` names it."""
        leaves = self.structure.flatten(value, what)
        return [leaves[i] for i in self.order]


def check_config(
    feature_config: Any, optimizer: Any, topology: Topology, config: Any
) -> CheckedConfig:
    """Checks the arguments of a TPUEmbeddingV2, and lays the tables out.

    A setting that is missing, wrong or has no effect raises a ValueError or a
    TypeError.
    """
    require_sparse_core_api()
    feature_config, spec = _read(feature_config, optimizer)
    order = tuple(nest.flatten(spec.structure.template))
    for feature in spec.features:
        check_feature(feature, topology)
    rules = {t.name: _rule(t) for t in _tables_of(feature_config)}
    if config is not None and not isinstance(
        config, _tpu.SparseCoreEmbeddingConfig
    ):
        raise TypeError(
            "sparse_core_embedding_config must be a "
            "tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig, got "
            f"{type(config).__name__}."
        )
    layout = Layout(feature_config, topology, config)
    check_layout(layout)
    return CheckedConfig(
        feature_config=feature_config,
        layout=layout,
        structure=spec.structure,
        order=order,
        features=tuple(
            dataclasses.replace(spec.features[i], output_shape=None)
            for i in order
        ),
        tables={table.name: table for table in spec.tables},
        rules={s.name: rules[s.tables[0].name] for s in layout.stacks.values()},
    )


def _read(feature_config: Any, optimizer: Any) -> tuple[Any, EmbeddingSpec]:
    """A completed copy of the configuration, and its spec."""
    Structure.split(
        feature_config, lambda node: isinstance(node, _tpu.FeatureConfig)
    )
    feature_config = tpu_embedding_v3._clone_feature_config(feature_config)
    for i, table in enumerate(_tables_of(feature_config)):
        # TensorFlow names unnamed tables in this order.
        table.name = table.name or f"table_{i}"
        if table.optimizer is None:
            table.optimizer = optimizer
        table.optimizer = _hashable(table.optimizer)
    spec = parse_configs(feature_config)
    for table in spec.tables:
        require_float32(table, "on SparseCores")
    return feature_config, spec


def parse_configs(feature_config: Any) -> EmbeddingSpec:
    """Parses TensorFlow's FeatureConfigs, without settings only it reads."""
    plain = tpu_embedding_v3._clone_feature_config(feature_config)
    for table in _tables_of(plain):
        table.quantization_config = table.layout = None
    return parse(plain)


def _tables_of(feature_config: Any) -> list[Any]:
    """The tables in TensorFlow's order: by their first feature."""
    features = nest.flatten(feature_config)
    return list({id(f.table): f.table for f in features}.values())


def _hashable(optimizer: Any) -> Any:
    """The optimizer with a hashable learning rate.

    TensorFlow hashes optimizers when it stacks tables. A variable has no hash;
    its bound method `read_value` does.
    """
    if isinstance(optimizer, _Optimizer):
        rate = optimizer.learning_rate
        if isinstance(rate, tf.Variable):
            optimizer = copy.copy(optimizer)
            optimizer.learning_rate = rate.read_value
    return optimizer


def check_feature(feature: FeatureSpec, topology: Topology) -> None:
    """Checks that SparseCores can share a feature's samples."""
    shape = feature.output_shape
    if shape is None or None in shape:
        raise ValueError(
            f"{feature}: output_shape must be known, got "
            f"{'none' if shape is None else list(shape)}; give the batch of "
            "one chip, e.g. FeatureConfig(table, output_shape=[batch])."
        )
    if feature.max_sequence_length:
        raise ValueError(
            f"{feature}: max_sequence_length={feature.max_sequence_length} has "
            "no effect on SparseCores; leave it out, give output_shape="
            "[batch, length], and a row of ids for each position."
        )
    samples = tf.TensorShape(shape).num_elements()
    if not samples or samples % topology.sparse_cores:
        raise ValueError(
            f"{feature}: output_shape={list(shape)} is {samples} samples per "
            f"chip, which {topology.sparse_cores} SparseCores can't share "
            f"equally; use a multiple of {topology.sparse_cores}."
        )


def _rule(table: Any) -> UpdateRule | None:
    where = f"Table '{table.name}'"
    optimizer = table.optimizer
    if optimizer is None:
        return None
    if not isinstance(optimizer, _Optimizer):
        raise ValueError(
            f"{where}: {type(optimizer).__name__} is an unsupported optimizer; "
            f"use {TPU_OPTIMIZERS}."
        )
    if is_schedule(optimizer.learning_rate):
        raise TypeError(
            f"{where}: the learning rate is a schedule, which needs a step; "
            "give a callable, e.g. lambda: schedule(step)."
        )
    converted = convert(optimizer, where)
    assert converted is not None
    require_tpu(converted, f"{where}: {type(optimizer).__name__}")
    return converted.rule


def check_layout(layout: Layout) -> None:
    """Checks the sizes of a layout's stacks, and their limits."""
    for stack in layout.stacks.values():
        if stack.rows <= MAX_ROWS:
            continue
        table = max(stack.tables, key=lambda t: t.vocabulary_size)
        raise ValueError(
            f"Stack '{stack.name}' has {stack.rows} rows, padding included; "
            f"SparseCores count at most {MAX_ROWS}. Its largest table, "
            f"'{table.name}', has {table.vocabulary_size}: make it smaller, or "
            "set disable_table_stacking."
        )
    config = layout.config
    integer(
        config.max_ids_per_chip_per_sample,
        "max_ids_per_chip_per_sample",
        most=MAX_ROWS,
    )
    for field in ("max_ids_per_table", "max_unique_ids_per_table"):
        limits = getattr(config, field)
        if limits is None:
            continue
        if not isinstance(limits, Mapping):
            raise TypeError(
                f"{field} must be a dict from stack names to limits, got "
                f"{type(limits).__name__}."
            )
        for name, value in limits.items():
            if name not in layout.stacks:
                hint = f"the stacks are {sorted(layout.stacks)}."
                if name in layout.stack_of:
                    hint = (
                        f"table '{name}' is in the stack "
                        f"'{layout.stack_of[name]}': use that name."
                    )
                raise ValueError(f"{field} has no stack '{name}'; {hint}")
            integer(value, f"{field}['{name}']", most=MAX_ROWS)
    for stack in layout.stacks.values():
        capacity = config.max_ids_per_chip_per_sample * stack.samples
        if capacity % 8:
            raise ValueError(
                f"Stack '{stack.name}': max_ids_per_chip_per_sample="
                f"{config.max_ids_per_chip_per_sample} times {stack.samples} "
                f"samples per chip is {capacity} ids, which must be a multiple "
                "of 8; choose another limit or batch size."
            )
