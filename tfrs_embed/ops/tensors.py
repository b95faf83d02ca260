"""Ids and weights that are not tensors yet: Python's lists, numpy's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.configs import FeatureSpec


def ids_to_tensor(feature: FeatureSpec, ids: Any) -> Any:
    """Turns a feature's ids into a tensor, if they aren't one.

    Args:
        feature: the feature, for errors.
        ids: a tensor of any kind, which is returned as it is; an integer, a
            list, or a numpy array. Rows of
            several lengths, or numpy's array of arrays, become a RaggedTensor.

    Returns:
        The tensor.

    Raises:
        TypeError: it holds no numbers.
    """
    return _to_tensor(f"{feature}: ids", ids, None, None)


def weights_to_tensor(feature: FeatureSpec, weights: Any, ids: Any) -> Any:
    """Turns a feature's weights into a float32 tensor, ragged if the ids are.

    Args:
        feature: the feature, for errors.
        weights: the weights.
        ids: their ids, as `ids_to_tensor` returned them.

    Returns:
        The tensor, or None.

    Raises:
        TypeError: they hold no numbers.
    """
    if weights is None:
        return None
    ragged = True if isinstance(ids, tf.RaggedTensor) else None
    return _to_tensor(f"{feature}: weights", weights, np.float32, ragged)


def _to_tensor(what: str, value: Any, dtype: Any, ragged: bool | None) -> Any:
    # tf_keras has symbolic tensors of other names, which have a type_spec.
    symbolic = type(value).__name__ == "KerasTensor"
    if tf.is_tensor(value) or symbolic or hasattr(value, "type_spec"):
        return value
    rows = isinstance(value, (list, tuple)) or (
        isinstance(value, np.ndarray) and value.dtype == object
    )
    if rows and any(tf.is_tensor(row) for row in value):
        return value  # TensorFlow stacks them.
    if _is_objects(value) and all(
        isinstance(each, (str, bytes)) for each in value.flat
    ):
        return tf.convert_to_tensor(value)  # As pandas has strings.
    if ragged is None:
        ragged = rows and (
            isinstance(value, np.ndarray) or _lengths_differ(value)
        )
    try:
        if not ragged:
            array = np.asarray(value, dtype)
            if array.dtype == object:
                raise ValueError("it holds other things than numbers")
            return tf.convert_to_tensor(_typed(array))
        arrays = [_typed(np.asarray(row, dtype)) for row in value]
        for i, row in enumerate(arrays):
            if row.ndim != 1 or row.dtype == object:
                raise ValueError(f"row {i} isn't a list of numbers")
        flat = np.concatenate(arrays or [_typed(np.asarray([], dtype))])
        splits = np.cumsum([0, *(len(row) for row in arrays)])
        return tf.RaggedTensor.from_row_splits(flat, splits)
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{what} must be a tensor, a number, a list of numbers or a list "
            f"of rows of numbers; got {type(value).__name__}: {error}"
        ) from error


def _lengths_differ(rows: Any) -> bool:
    lengths = {
        len(row) if isinstance(row, (list, tuple, np.ndarray)) else None
        for row in rows
    }
    return len(lengths) > 1


def _typed(array: np.ndarray) -> np.ndarray:
    """An empty array as integers: numpy makes it of float64."""
    if array.size == 0 and array.dtype == np.float64:
        return array.astype(np.int64)
    return array


def _is_objects(value: Any) -> bool:
    return (
        isinstance(value, np.ndarray)
        and value.dtype == object
        and value.size > 0
    )
