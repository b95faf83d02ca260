"""Feature configurations as JSON-able dicts."""

from __future__ import annotations

import collections
import dataclasses
import sys
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfrs_embed import dynamic_keys, hashing, kerases
from tfrs_embed._tensorflow import init_ops_v2
from tfrs_embed.configs import (
    EmbeddingSpec,
    FeatureConfig,
    FeatureSpec,
    TableConfig,
    TableSpec,
)
from tfrs_embed.optimizers import conversion
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.strategies import require_sparse_core_api

_tpu = tf.tpu.experimental.embedding

# The key by which an initializer's Keras is known, where it isn't the layer's.
_KERAS = "keras"


def features_to_config(
    spec: EmbeddingSpec, optimizers: Mapping[str, TableOptimizer], keras: Any
) -> dict[str, Any]:
    """Returns a configuration as a JSON-able dict.

    Args:
        spec: the configuration.
        optimizers: what trains the tables, by their names, where an engine
            does; the learning rates are stored that these have now.
        keras: the Keras that stores what is of neither.

    Returns:
        Its optimizers, its tables, each naming its optimizer by position, its
        features, each naming its table by position, and its nesting, each leaf
        a feature's position.

    Raises:
        ValueError: an optimizer's learning rate can't be stored.
    """
    # Tables that share an optimizer share its learning rate. Equal names are
    # not one.
    shared: dict[int, list[TableSpec]] = {}
    for table in spec.tables:
        named = isinstance(table.optimizer, str)
        key = id(table) if named else id(table.optimizer)
        shared.setdefault(key, []).append(table)
    places = {
        table.name: place
        for place, tables in enumerate(shared.values())
        for table in tables
    }
    return {
        "optimizers": [
            conversion.serialize(
                tables[0].optimizer,
                next(
                    (o for t in tables if (o := optimizers.get(t.name))), None
                ),
            )
            for tables in shared.values()
        ],
        "tables": [
            _table_to_config(table, places[table.name], keras)
            for table in spec.tables
        ],
        "features": [
            _feature_to_config(f, spec.tables.index(f.table))
            for f in spec.features
        ],
        "structure": _encode(spec.structure.template),
    }


def features_from_config(config: Any, keras: Any) -> Any:
    """Returns the nesting of FeatureConfigs that was stored.

    Args:
        config: what `features_to_config` returned.
        keras: the Keras of initializers and optimizers.

    Returns:
        The nesting; features that shared a table share one again, and tables
        that shared an optimizer.
    """
    shared = [conversion.deserialize(o, keras) for o in config["optimizers"]]
    tables = [
        _table_from_config(table, shared, keras) for table in config["tables"]
    ]
    features = [_feature_from_config(f, tables) for f in config["features"]]
    return _decode(config["structure"], features)


def dataclass_to_config(value: Any) -> dict[str, Any] | None:
    """Returns a dataclass as a dict, None for None."""
    return None if value is None else dataclasses.asdict(value)


def sparse_core_from_config(config: dict[str, Any] | None) -> Any:
    """Returns the SparseCoreEmbeddingConfig that was stored, or None."""
    if not isinstance(config, Mapping):
        return config
    require_sparse_core_api()
    return tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig(**config)


def _table_to_config(
    table: TableSpec, optimizer: int, keras: Any
) -> dict[str, Any]:
    config = {
        "name": table.source.name,
        "vocabulary_size": table.vocabulary_size,
        "initializer": initializer_to_config(table.source.initializer, keras),
        "optimizer": optimizer,
        "combiner": table.combiner,
    }
    if table.dtype != "float32":
        config["dtype"] = table.dtype
    if not isinstance(table.source, TableConfig):
        return {"kind": "tpu", "dim": table.dim, **config}
    if table.keys is not None:
        config["keys"] = dynamic_keys.to_config(table.keys)
    # The plan's, as the placement is, which others may not go with.
    if table.hot_rows != ():
        config["hot_rows"] = table.hot_rows
    if table.dtype != "float32":
        config["rounding"] = table.rounding
    return {
        "kind": "own",
        "embedding_dim": table.dim,
        "placement": table.placement,
        "max_ids_per_partition": table.max_ids_per_partition,
        "max_unique_ids_per_partition": table.max_unique_ids_per_partition,
        **config,
    }


def _table_from_config(
    config: Mapping[str, Any], shared: list[Any], keras: Any
) -> Any:
    arguments = dict(config)
    kind = arguments.pop("kind")
    arguments["initializer"] = initializer_from_config(
        arguments["initializer"], keras
    )
    arguments["optimizer"] = shared[arguments["optimizer"]]
    if "keys" in arguments:
        arguments["keys"] = dynamic_keys.from_config(arguments["keys"])
    if kind == "own":
        return TableConfig(**arguments)
    if "dtype" in arguments:
        arguments["dtype"] = tf.as_dtype(arguments["dtype"])
    return _tpu.TableConfig(**arguments)


def initializer_to_config(initializer: Any, keras: Any) -> Any:
    """Returns an initializer as what JSON can hold."""
    if kerases.is_initializer(initializer):
        own = kerases.of(initializer)
        config = own.initializers.serialize(initializer)
        # Classes of one name have other arguments in the other Keras.
        return config if own is keras else {_KERAS: own.__name__, **config}
    return keras.saving.serialize_keras_object(initializer)


def initializer_from_config(config: Any, keras: Any) -> Any:
    """Returns the initializer that was stored, of a Keras if it was one's."""
    if config and _KERAS in config:
        config = dict(config)
        keras = kerases.named(config.pop(_KERAS))
    # Keras's HDF5 format has no module names, and TensorFlow's own
    # initializers are only found by theirs.
    module = config.get("module", "keras") if config else "keras"
    if module.split(".")[0] in ("keras", "tf_keras"):
        return keras.initializers.deserialize(config)
    if module == init_ops_v2.__name__:
        # Keras 3 imports nothing of TensorFlow's.
        kind = getattr(init_ops_v2, config["class_name"])
        return kind.from_config(config["config"])
    return keras.saving.deserialize_keras_object(config)


def _feature_to_config(feature: FeatureSpec, table: int) -> dict[str, Any]:
    source = feature.source
    config = {
        "name": source.name,
        "table": table,
        "max_sequence_length": feature.max_sequence_length,
    }
    if isinstance(source, FeatureConfig):
        if feature.hashing is not None:
            config["hashing"] = hashing.to_config(feature.hashing)
        return {
            "kind": "own",
            "input_shape": source.input_shape,
            "output_shape": source.output_shape,
            **config,
        }
    return {
        "kind": "tpu",
        "output_shape": feature.output_shape,
        "validate_weights_and_indices": source.validate_weights_and_indices,
        **config,
    }


def _feature_from_config(config: Mapping[str, Any], tables: list[Any]) -> Any:
    arguments = dict(config)
    kind = arguments.pop("kind")
    arguments["table"] = tables[arguments["table"]]
    if "hashing" in arguments:
        arguments["hashing"] = hashing.from_config(arguments["hashing"])
    return (FeatureConfig if kind == "own" else _tpu.FeatureConfig)(**arguments)


def _encode(template: Any) -> Any:
    """A nesting as JSON keeps it: JSON has no tuples and no integer keys."""
    if isinstance(template, int):
        return template
    if isinstance(template, dict):
        return {
            "dict": [[key, _encode(node)] for key, node in template.items()]
        }
    nodes = [_encode(node) for node in template]
    if hasattr(template, "_fields"):
        kind = type(template)
        return {
            "namedtuple": {
                "module": kind.__module__,
                "name": kind.__qualname__,
                "fields": list(kind._fields),
                "nodes": nodes,
            }
        }
    return {"tuple" if isinstance(template, tuple) else "list": nodes}


def _decode(config: Any, leaves: list[Any]) -> Any:
    if isinstance(config, int):
        return leaves[config]
    [(kind, nodes)] = config.items()
    if kind == "dict":
        return {_key(key): _decode(node, leaves) for key, node in nodes}
    if kind == "namedtuple":
        children = [_decode(node, leaves) for node in nodes["nodes"]]
        return _named_tuple(nodes)(*children)
    children = [_decode(node, leaves) for node in nodes]
    return tuple(children) if kind == "tuple" else children


def _key(key: Any) -> Any:
    """A dict's key; a list is what JSON made of a tuple."""
    return tuple(map(_key, key)) if isinstance(key, list) else key


def _named_tuple(config: Mapping[str, Any]) -> Any:
    """The class of a named tuple that was stored.

    A file doesn't import modules. Where the class's own isn't there, TensorFlow
    takes one of the same name and fields for the same.
    """
    found: Any = sys.modules.get(config["module"])
    for name in config["name"].split("."):
        found = getattr(found, name, None)
    fields = tuple(config["fields"])
    if isinstance(found, type) and getattr(found, "_fields", None) == fields:
        return found
    name = config["name"].rpartition(".")[2]
    return collections.namedtuple(name, fields, rename=True)
