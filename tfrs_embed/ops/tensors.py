"""Conversion of Python's lists and arrays to tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def ids_to_tensor(
    ids: Any, what: str, dtype: Any = tf.int64, ragged: bool | None = None
) -> Any:
    """Converts ids of pandas, NumPy and Python to a tensor, before Keras does.

    Keras converts no Series of a dtype of pandas's own, and each number of a
    list by itself. Python's integers become numbers of `dtype`. Tensors, and
    lists of them, stay as they are. Missing values are a TypeError.
    """
    if hasattr(ids, "to_numpy") or isinstance(ids, np.ndarray):
        _require_all(ids, what)
        ids = ids.to_numpy() if hasattr(ids, "to_numpy") else ids
        leaves = ids.flat if ids.dtype == object else ()
    elif isinstance(ids, (list, tuple)):
        leaves = tf.nest.flatten(ids)
    else:
        return ids
    kinds = {type(each) for each in leaves}
    if any(issubclass(k, tf.Tensor) or "Tensor" in k.__name__ for k in kinds):
        return ids
    own = dtype.as_numpy_dtype if kinds == {int} and dtype.is_integer else None
    return to_tensor(ids, what, own, ragged)


def _require_all(ids: Any, what: str) -> None:
    """Raises a TypeError if there is no id in some place, or NaN."""
    missing = np.zeros([])
    if hasattr(ids, "isna"):
        missing = np.asarray(ids.isna())
    elif ids.dtype.kind == "f":
        missing = np.isnan(ids)
    if missing.any():
        raise TypeError(
            f"{what} have {missing.sum()} missing values (NaN, NA), the first "
            f"at position {np.argwhere(missing)[0].tolist()}. Leave them out, "
            "or give them an id of their own, such as the padding_value of the "
            "feature: fillna(0).astype('int64') of pandas, fillna('') for "
            "strings, [] for a list."
        )


def to_tensor(
    value: Any, what: str, dtype: Any = None, ragged: bool | None = None
) -> Any:
    """Converts numbers, strings, lists, arrays and pandas's to a tensor.

    Tensors of any kind stay as they are; other values raise a TypeError that
    begins with `what`. `dtype` is NumPy's; None: the values' own. `ragged`
    tells whether rows become a RaggedTensor; None: if they are an array of
    arrays, or of several lengths.
    """
    # Some of tf_keras's symbolic tensors have other names, and a type_spec.
    symbolic = type(value).__name__ == "KerasTensor"
    if tf.is_tensor(value) or symbolic or hasattr(value, "type_spec"):
        return value
    if hasattr(value, "to_numpy"):
        value = value.to_numpy()
    try:
        given = [v.dtype for v in tf.nest.flatten(value) if tf.is_tensor(v)]
        if given:
            # Keras makes int32 or int64 tensors of Python's integers.
            if set(given) == {tf.int32, tf.int64}:
                value = tf.nest.map_structure(
                    lambda v: tf.cast(v, tf.int64), value
                )
            if ragged:
                return tf.RaggedTensor.from_row_lengths(
                    tf.concat([tf.stack(row) for row in value if len(row)], 0),
                    [len(row) for row in value],
                )
            return tf.convert_to_tensor(value)
        if ragged or (ragged is None and _is_ragged(value)):
            return _rows(value, dtype)
        return tf.convert_to_tensor(_array(value, dtype))
    except (
        TypeError,
        ValueError,
        OverflowError,
        tf.errors.InvalidArgumentError,
    ) as error:
        raise TypeError(
            f"{what} must be a Tensor, RaggedTensor or SparseTensor, or a "
            "number, a list of numbers or a list of rows of numbers; got "
            f"{type(value).__name__}: {error}"
        ) from error


def map_values(function: Callable[[tf.Tensor], tf.Tensor], tensor: Any) -> Any:
    """Applies a function to the values of a tensor of any kind."""
    if isinstance(tensor, tf.RaggedTensor):
        return tensor.with_flat_values(function(tensor.flat_values))
    if isinstance(tensor, tf.SparseTensor):
        mapped = tensor.with_values(function(tensor.values))
        mapped.set_shape(tensor.shape)
        return mapped
    return function(tensor)


def _is_ragged(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        # pandas keeps strings as objects, and integers with missing ones.
        return value.dtype == object and any(
            isinstance(row, (list, tuple, np.ndarray)) for row in value.flat
        )
    if not isinstance(value, (list, tuple)):
        return False
    lengths = {
        len(row) if isinstance(row, (list, tuple, np.ndarray)) else None
        for row in value
    }
    return len(lengths) > 1


def _rows(value: Any, dtype: Any) -> tf.RaggedTensor:
    rows = [_array(row, dtype) for row in value]
    for i, row in enumerate(rows):
        if row.ndim != 1:
            raise ValueError(f"row {i} isn't a list of numbers")
    flat = np.concatenate(rows or [_array([], dtype)])
    splits = np.cumsum([0, *(len(row) for row in rows)])
    return tf.RaggedTensor.from_row_splits(flat, splits)


def _array(value: Any, dtype: Any) -> np.ndarray:
    array = np.asarray(value, dtype)
    if array.dtype.kind in "mM":
        raise ValueError(
            "dates and times are no ids. Make numbers of them, such as "
            "dates.dt.day_of_week of pandas"
        )
    if array.dtype.kind in "US" and not isinstance(value, np.ndarray):
        # NumPy's strings drop zero bytes at their end.
        array = np.asarray(value, object)
    if array.dtype == object and not _are_strings(array):
        # Integers, unless there are others among them.
        if all(isinstance(each, (int, np.integer)) for each in array.flat):
            return np.array(array.tolist(), dtype)
        kinds = sorted({type(each).__name__ for each in array.flat})
        raise ValueError(
            "its values are neither all numbers nor all strings, but "
            f"{', '.join(kinds)}"
        )
    if array.size == 0 and array.dtype == np.float64:
        return array.astype(np.int64)  # An empty list's dtype says nothing.
    return array


def _are_strings(array: np.ndarray) -> bool:
    return all(isinstance(each, (str, bytes)) for each in array.flat)
