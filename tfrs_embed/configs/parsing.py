"""Turns declarations of features into their checked, immutable form.

`TableConfig` and `FeatureConfig` have the signatures of keras_rs's. Those of
`tf.tpu.experimental.embedding` and of keras_rs are accepted as well.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import keras_versions
from tfrs_embed.compat.arguments import integer
from tfrs_embed.configs.structure import Structure
from tfrs_embed.configs.tables import (
    EmbeddingSpec,
    FeatureConfig,
    FeatureSpec,
    TableConfig,
    TableSpec,
    check_table,
    is_of_keras_rs,
    is_table,
)

_tpu = tf.tpu.experimental.embedding


def parse(
    feature_config: Any, keras: Any = None, owner: str = ""
) -> EmbeddingSpec:
    """Turns any accepted configuration into its checked, immutable form.

    Args:
        feature_config: a `FeatureConfig` or `TableConfig`, ours, TF's or
            keras_rs's, or any nesting of dicts, lists and tuples of them. A
            table stands for a feature with the defaults of `FeatureConfig`.
        keras: the Keras of default initializers; None: `default()`.
        owner: the tables' `owner`.

    Raises:
        ValueError: no features, two tables of one name, or an unsupported
            setting.
        TypeError: another object than a feature config in the nesting.
    """
    structure, configs = Structure.split(
        feature_config,
        lambda node: (
            is_table(node)
            or isinstance(node, (FeatureConfig, _tpu.FeatureConfig))
            or is_of_keras_rs(node, FeatureConfig)
        ),
    )
    if not configs:
        raise ValueError("The feature configuration has no features.")
    [(path, count)] = collections.Counter(structure.paths).most_common(1)
    if count > 1:
        raise ValueError(
            f"Two features have one path, '{path}': a feature's name is its "
            f"keys, joined by '/'. All of them: {sorted(structure.paths)}."
        )
    keras = keras or keras_versions.default()
    tables: dict[int, TableSpec] = {}
    features = []
    for config, path in zip(configs, structure.paths, strict=True):
        name = path or config.name or "feature"
        source = config if is_table(config) else config.table
        if id(source) not in tables:
            check_table(source, f"Feature '{name}'")
            tables[id(source)] = _table_spec(source, len(tables), keras, owner)
        table = tables[id(source)]
        if config is source:
            config = FeatureConfig(name, table.source)
        elif is_of_keras_rs(config, FeatureConfig):
            values = _values_of(config, FeatureConfig)
            config = FeatureConfig(**{**values, "table": table.source})
        elif isinstance(config, FeatureConfig):  # Its table may be keras_rs's.
            config = dataclasses.replace(
                config, name=config.name or name, table=table.source
            )
        features.append(_feature_spec(config, name, table))
    names = collections.Counter(table.name for table in tables.values())
    [(name, count)] = names.most_common(1)
    if count > 1:
        raise ValueError(
            f"Two different tables are named '{name}'. Features that share a "
            "table must use the same TableConfig object."
        )
    return EmbeddingSpec(structure, tuple(features), tuple(tables.values()))


def _values_of(config: Any, own: type) -> dict[str, Any]:
    """Returns the values of a keras_rs config for our fields."""
    names = [field.name for field in dataclasses.fields(own)]
    return {n: getattr(config, n) for n in names if hasattr(config, n)}


def _table_spec(config: Any, index: int, keras: Any, owner: str) -> TableSpec:
    if is_of_keras_rs(config, TableConfig):
        # keras_rs's configs are mutable and not hashable.
        fields = _values_of(config, TableConfig)
        if isinstance(fields["initializer"], (str, dict)):
            given = keras.initializers.get(fields["initializer"])
            fields["initializer"] = given
        config = TableConfig(**fields)
    own = config
    if not isinstance(config, TableConfig):
        # TF numbers tables without names in this way, too.
        name = config.name or f"table_{index}"
        for setting in ("quantization_config", "layout"):
            if getattr(config, setting, None) is not None:
                raise ValueError(f"Table '{name}': {setting} is unsupported.")
        # TF checks these when a config is made, but its fields can be assigned.
        own = TableConfig(
            name,
            config.vocabulary_size,
            integer(config.dim, f"Table '{name}': dim"),
            config.initializer,
            combiner=config.combiner,
            # Older versions of TensorFlow do not have this setting.
            dtype=getattr(config, "dtype", "float32"),
        )
    values = {f.name: getattr(own, f.name) for f in dataclasses.fields(own)}
    values["initializer"] = _own_copy(own.initializer)
    if own.initializer is None:
        # TF's configs always have one.
        kinds = keras.initializers
        values["initializer"] = kinds.VarianceScaling(mode="fan_out")
    values["optimizer"] = config.optimizer
    return TableSpec(source=config, owner=owner, **values)


def _feature_spec(config: Any, name: str, table: TableSpec) -> FeatureSpec:
    output_shape: tuple[int | None, ...] | None
    if isinstance(config, FeatureConfig):
        # keras_rs counts the embedding dim, TF does not. Its batch is the
        # global one, which the last, partial batch of an epoch need not have.
        output_shape = None
        if config.output_shape is not None:
            output_shape = (None, *config.output_shape[1:-1])
    elif config.output_shape.rank is None:
        output_shape = None
    else:
        output_shape = tuple(config.output_shape.as_list())
        if not output_shape:
            raise ValueError(
                f"Feature '{name}': output_shape [] has no batch dimension."
            )
    length = integer(
        config.max_sequence_length, f"Feature '{name}': max_sequence_length", 0
    )
    if (
        length
        and output_shape is not None
        and (len(output_shape) < 2 or output_shape[-1] != length)
    ):
        raise ValueError(
            f"Feature '{name}' (table '{table.name}'): max_sequence_length="
            f"{length} contradicts output_shape={list(output_shape)}; a "
            f"sequence has the output_shape [batch, {length}]."
        )
    return FeatureSpec(
        name,
        table,
        length,
        output_shape,
        config,
        hashing=getattr(config, "hashing", None),
    )


def _own_copy(initializer: Any) -> Any:
    """Returns a table's own copy of a Keras initializer without a seed.

    Tables that shared it would start equal, as each call repeats its values.
    """
    if not keras_versions.is_initializer(initializer):
        return initializer
    # Keras 3's picks a seed of its own, and keeps what it was given too.
    seed = getattr(initializer, "seed", 0)
    if getattr(initializer, "_init_seed", seed) is None:
        return type(initializer).from_config(initializer.get_config())
    return initializer
