"""JSON descriptions of the settings that decide a table's numbers.

Workers compare them. A value without a configuration has a name: a function's
place of definition, or any other object's class.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import numbers
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.configs.tables import FeatureSpec, TableSpec
from tfrs_embed.optimizers.rules import TableOptimizer

# Larger arrays are described by a digest.
_MOST_NUMBERS = 16
_OF_TABLE = (
    *("vocabulary_size", "dim", "dtype", "rounding", "combiner"),
    *("initializer", "keys", "ranks"),
)


def of_tables(
    tables: Iterable[TableSpec],
    optimizers: Mapping[str, TableOptimizer | None],
) -> dict[str, Any]:
    """Describes tables, by the name of each in errors."""
    return {
        f"Table '{table.name}'": {
            **{field: describe(getattr(table, field)) for field in _OF_TABLE},
            "optimizer": _of_optimizer(optimizers.get(table.name)),
            # Large arrays have a digest.
            "hot_rows": describe(np.asarray(table.hot_rows, np.int64)),
        }
        for table in tables
    }


def of_features(features: Iterable[FeatureSpec]) -> dict[str, Any]:
    """Describes features, by the name of each in errors."""
    return {
        f"Feature '{feature.name}'": {
            "table": feature.table.name,
            "max_sequence_length": feature.max_sequence_length,
            # Workers' batches may have different sizes.
            "output_shape": feature.output_shape
            and ["batch", *describe(feature.output_shape[1:])],
            "sequences": feature.sequences,
            "combiner": "table" if feature.combined else None,
            "hashing": describe(feature.hashing),
            "padding_value": feature.padding_value,
        }
        for feature in features
    }


def _of_optimizer(optimizer: TableOptimizer | None) -> Any:
    if optimizer is None:
        return None
    rate = optimizer.rate
    return {
        "rule": describe(optimizer.rule),
        **describe(optimizer.options.given()),
        "learning_rate": describe(rate.given()),
        "learning_rate is multiplied by": rate.formulas,
    }


def describe(value: Any) -> Any:
    """Describes a value by numbers, strings, None, lists and dicts.

    Every process that has the value describes it the same way.
    """
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, (tf.Variable, tf.Tensor, np.ndarray, np.generic)):
        return _of_array(value)
    if isinstance(value, numbers.Real):
        number = float(value)
        return int(number) if number.is_integer() else number
    if isinstance(value, tf.DType):
        return value.name
    if isinstance(value, tf.TensorShape):
        return None if value.rank is None else value.as_list()
    if isinstance(value, Mapping):
        return {str(key): describe(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [describe(each) for each in value]
    if isinstance(value, functools.partial):
        described = [describe(each) for each in (value.func, value.args)]
        return {"partial": [*described, describe(value.keywords)]}
    if hasattr(value, "__qualname__"):
        return _name(value)
    return _of_object(value)


def _of_object(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        settings = {
            field.name: describe(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
        return {"class": _name(type(value)), **settings}
    try:
        config = value.get_config()
    except Exception:  # There is no config, or none of this object.
        return _name(type(value))
    return {"class": _name(type(value)), "config": describe(config)}


def _of_array(value: Any) -> Any:
    if isinstance(value, tf.Tensor) and not hasattr(value, "numpy"):
        return f"a tensor of {value.dtype.name} {value.shape}"
    array = np.asarray(value.numpy() if tf.is_tensor(value) else value)
    if array.size > _MOST_NUMBERS:
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes())
        return {
            "dtype": array.dtype.name,
            "shape": list(array.shape),
            "sha256": digest.hexdigest(),
        }
    if array.dtype == np.float32:
        # 0.1, not 0.10000000149011612.
        array = np.vectorize(lambda x: float(str(x)), otypes=[object])(array)
    return describe(array.tolist())


def _name(value: Any) -> str:
    """Returns the place of a function's or class's definition."""
    return f"{getattr(value, '__module__', None)}.{value.__qualname__}"
