"""Checks the values that users set tables to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs.tables import TableSpec


def check_values(
    given: Mapping[str, Any], tables: Sequence[TableSpec], layer: str
) -> dict[str, tf.Tensor]:
    """Checks the argument of `load_tables`, and raises its errors.

    Returns:
        Each table's values, [vocabulary_size, dim] numbers on the host.
    """
    specs = {table.name: table for table in tables}
    values = {}
    for name, value in given.items():
        if name not in specs:
            raise ValueError(
                f"Layer '{layer}' has no table '{name}'; its tables "
                f"are {list(specs)}."
            )
        if specs[name].keys is not None:
            raise ValueError(
                f"Table '{name}' has DynamicKeys: its rows can't be set "
                "without its keys. Restore a checkpoint."
            )
        values[name] = _rows_of(name, value)
        wanted = (specs[name].vocabulary_size, specs[name].dim)
        if values[name].shape != wanted:
            raise ValueError(
                f"Table '{name}' has the shape {wanted}, and can't be "
                f"given values of shape {tuple(values[name].shape)}."
            )
    return values


def _rows_of(name: str, value: Any) -> tf.Tensor:
    """A table's values on the host, from an array, a variable or a layer."""
    if hasattr(value, "get_weights"):  # A layer, of whatever Keras.
        table = getattr(value, "embeddings", None)
        if table is None:
            raise ValueError(
                f"Table '{name}': layer '{value.name}' has no embeddings; it "
                "must be an Embedding layer that is built or was called."
            )
        value = table
    with tf.init_scope(), tf.device("CPU:0"):
        if hasattr(value, "numpy"):
            value = value.numpy()
        try:
            rows = tf.convert_to_tensor(value)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"Table '{name}': {type(value).__name__} is no array of "
                f"numbers: {error}"
            ) from error
        if not (rows.dtype.is_floating or rows.dtype.is_integer):
            raise TypeError(
                f"Table '{name}': values must be numbers, got "
                f"{rows.dtype.name}."
            )
        return rows
