"""Feature configurations as JSON-able dicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import keras_configs, keras_versions
from tfrs_embed.compat.arguments import choice
from tfrs_embed.compat.strategies import require_sparse_core_api
from tfrs_embed.configs.dynamic_keys import (
    DecayingFrequency,
    DynamicKeys,
    FrequencyAdmission,
    ProbabilisticAdmission,
    TimeToLive,
)
from tfrs_embed.configs.file_storage import FileStorage
from tfrs_embed.configs.hashing import KINDS
from tfrs_embed.configs.tables import (
    EmbeddingSpec,
    FeatureConfig,
    FeatureSpec,
    TableConfig,
    TableSpec,
    by_optimizer,
)
from tfrs_embed.optimizers import conversion
from tfrs_embed.optimizers.rules import TableOptimizer

_tpu = tf.tpu.experimental.embedding

# Declarations in tables and features, by the class's name in a config.
_CLASS = "class"
_DECLARATIONS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *KINDS,
        DecayingFrequency,
        DynamicKeys,
        FileStorage,
        FrequencyAdmission,
        ProbabilisticAdmission,
        TimeToLive,
    )
}
# The arguments of TensorFlow's table and feature that are stored.
_OF_TPU_TABLE = (
    "name",
    "vocabulary_size",
    "dim",
    "initializer",
    "optimizer",
    "combiner",
)
_OF_TPU_FEATURE = (
    "name",
    "table",
    "max_sequence_length",
    "output_shape",
    "validate_weights_and_indices",
)
# The key of an initializer's Keras, if it isn't the layer's.
_KERAS = "keras"


def features_to_config(
    spec: EmbeddingSpec, optimizers: Mapping[str, TableOptimizer], keras: Any
) -> dict[str, Any]:
    """Returns a configuration as a JSON-able dict.

    It has lists of optimizers, tables and features, which refer to each other
    by position, and the features' nesting. `optimizers` are the engines', by
    table: their present learning rates are stored; rates that can't be stored
    are a ValueError. `keras` stores values of no Keras.
    """
    # Tables that share an optimizer share its learning rate.
    shared = by_optimizer(spec.tables)
    places = {
        id(table): place
        for place, tables in enumerate(shared)
        for table in tables
    }
    return {
        "optimizers": [
            conversion.serialize(
                tables[0].optimizer,
                next(
                    filter(None, (optimizers.get(t.name) for t in tables)), None
                ),
            )
            for tables in shared
        ],
        "tables": [
            _table_to_config(table, places[id(table)], keras)
            for table in spec.tables
        ],
        "features": [
            _feature_to_config(f, spec.tables.index(f.table))
            for f in spec.features
        ],
        "structure": _encode(spec.structure.template),
    }


def features_from_config(config: Any, keras: Any) -> Any:
    """Returns the nesting of FeatureConfigs that `features_to_config` stored.

    Tables shared by features, and optimizers shared by tables, are shared
    again. A name that isn't of its kind is a ValueError.
    """
    shared = [
        conversion.deserialize(o, keras, "A table's optimizer")
        for o in config["optimizers"]
    ]
    tables = [
        _table_from_config(table, shared, keras) for table in config["tables"]
    ]
    features = [_feature_from_config(f, tables) for f in config["features"]]
    return _decode(config["structure"], features)


def to_config(value: Any) -> Any:
    """Returns a declaration, or its field, as JSON-able."""
    if isinstance(value, tf.DType):
        return value.name
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, tuple):
        return [to_config(each) for each in value]
    if dataclasses.is_dataclass(value):
        stored = {n: to_config(getattr(value, n)) for n in _names(value)}
        return {_CLASS: type(value).__name__, **stored}
    return value


def from_config(config: Any) -> Any:
    """Returns the value stored by `to_config`; a dtype stays a name."""
    if isinstance(config, list):
        return [from_config(each) for each in config]
    if not isinstance(config, Mapping):
        return config
    fields = {name: from_config(value) for name, value in config.items()}
    name = fields.pop(_CLASS, None)
    choice(name, tuple(_DECLARATIONS), "A declaration's class")
    return _DECLARATIONS[name](**fields)


def sparse_core_from_config(config: Mapping[str, Any]) -> Any:
    """Returns the stored SparseCoreEmbeddingConfig."""
    require_sparse_core_api()
    return tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(**config)


def _names(declaration: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(declaration)]


def _fields_to_config(
    kind: str, value: Any, names: Iterable[str], stored: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the fields of some names; `stored` ones are as they are."""
    config = {"kind": kind}
    for n in names:
        config[n] = stored[n] if n in stored else to_config(getattr(value, n))
    return config


def _table_to_config(
    table: TableSpec, optimizer: int, keras: Any
) -> dict[str, Any]:
    source = table.source
    stored = {
        "name": source.name,
        "embedding_dim": table.dim,
        "initializer": initializer_to_config(
            source.initializer, keras, f"Table '{source.name}'"
        ),
        "optimizer": optimizer,
    }
    # Placement and hot rows are the spec's, as a plan may have set both.
    if isinstance(source, TableConfig):
        return _fields_to_config("own", table, _names(TableConfig), stored)
    names = [*_OF_TPU_TABLE]
    # Older versions of TensorFlow do not have this setting.
    if table.dtype != "float32":
        names.append("dtype")
    return _fields_to_config("tpu", table, names, stored)


def _table_from_config(
    config: Mapping[str, Any], shared: list[Any], keras: Any
) -> Any:
    arguments = dict(config)
    kind = arguments.pop("kind")
    arguments["initializer"] = initializer_from_config(
        arguments["initializer"], keras, f"Table '{arguments['name']}'"
    )
    arguments["optimizer"] = shared[arguments["optimizer"]]
    if kind == "own":
        for name in ("keys", "storage"):
            arguments[name] = from_config(arguments.get(name))
        return TableConfig(**arguments)
    if "dtype" in arguments:
        arguments["dtype"] = tf.as_dtype(arguments["dtype"])
    return _tpu.TableConfig(**arguments)


def initializer_to_config(initializer: Any, keras: Any, where: str) -> Any:
    """Returns an initializer as JSON-able.

    `where` begins the TypeError of an object without `get_config`, and the
    NotImplementedError of one that has too many numbers.
    """
    keras_configs.require_small(initializer, where)
    if keras_versions.is_initializer(initializer):
        own = keras_versions.keras_of(initializer)
        config = own.initializers.serialize(initializer)
        # Classes of one name have different arguments in the two versions.
        return config if own is keras else {_KERAS: own.__name__, **config}
    try:
        return keras.saving.serialize_keras_object(initializer)
    except TypeError as error:
        raise TypeError(
            f"{where}: the initializer can't be stored: {error}"
        ) from error


def initializer_from_config(config: Any, keras: Any, where: str) -> Any:
    """Returns the stored initializer, of its own Keras or the layer's.

    `where` begins the ValueError of what is no initializer, or isn't known.
    """
    if isinstance(config, Mapping) and _KERAS in config:
        config = dict(config)
        keras = keras_versions.named(config.pop(_KERAS))
    return keras_configs.deserialize(config, "initializers", keras, where)


def _feature_to_config(feature: FeatureSpec, table: int) -> dict[str, Any]:
    source = feature.source
    stored: dict[str, Any] = {"table": table}
    if isinstance(source, FeatureConfig):
        keras_configs.require_few(
            np.size(getattr(source.hashing, "codes", 0)),
            "a PrefixNGrams",
            str(feature),
            "Save weights or checkpoints, which are saved without configs.",
        )
        return _fields_to_config("own", source, _names(FeatureConfig), stored)
    stored["output_shape"] = feature.output_shape
    return _fields_to_config("tpu", source, _OF_TPU_FEATURE, stored)


def _feature_from_config(config: Mapping[str, Any], tables: list[Any]) -> Any:
    arguments = dict(config)
    kind = arguments.pop("kind")
    arguments["table"] = tables[arguments["table"]]
    if kind == "tpu":
        return _tpu.FeatureConfig(**arguments)
    hashing = from_config(arguments.pop("hashing", None))
    return FeatureConfig(hashing=hashing, **arguments)


def _encode(template: Any) -> Any:
    """Returns a nesting for JSON, which has neither tuples nor integer keys."""
    if isinstance(template, int):
        return template
    if isinstance(template, dict):
        return {
            "dict": [[key, _encode(node)] for key, node in template.items()]
        }
    if hasattr(template, "_fields"):
        raise NotImplementedError(
            "A layer's config can't store the named tuple "
            f"{type(template).__name__} of features: use a dict."
        )
    nodes = [_encode(node) for node in template]
    return {"tuple" if isinstance(template, tuple) else "list": nodes}


def _decode(config: Any, leaves: list[Any]) -> Any:
    if isinstance(config, int):
        return leaves[config]
    [(kind, nodes)] = config.items()
    if kind == "dict":
        return {_key(key): _decode(node, leaves) for key, node in nodes}
    children = [_decode(node, leaves) for node in nodes]
    return tuple(children) if kind == "tuple" else children


def _key(key: Any) -> Any:
    """Returns a dict's key; JSON made lists of tuples."""
    return tuple(map(_key, key)) if isinstance(key, list) else key
