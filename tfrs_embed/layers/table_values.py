"""Sets tables to values that users give."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import blocks
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.storage.table_state import TableState


class Values(NamedTuple):
    """Rows that a table is given, and slots if they are another table's.

    Attributes:
        readers: for each part by its name, a function of rows' numbers.
        numbers: [vocabulary_size] int64, the row of these for each of the
            table's rows; -1: the row stays.
    """

    readers: dict[str, Callable[[np.ndarray], tf.Tensor]]
    numbers: np.ndarray


def check_values(
    given: Mapping[str, Any],
    tables: Mapping[str, TableState],
    rows: Mapping[str, Any],
    layer: str,
) -> dict[str, Values]:
    """Checks the arguments of `load_tables`, and raises its errors."""
    values = {}
    for name in (*given, *rows):
        if name not in tables:
            raise ValueError(
                f"Layer '{layer}' has no table '{name}'; its tables "
                f"are {list(tables)}."
            )
        if name not in given:
            raise ValueError(f"Table '{name}': rows without values.")
        if tables[name].spec.keys is not None:
            raise ValueError(
                f"Table '{name}' has DynamicKeys: its rows can't be set "
                "without its keys. Restore a checkpoint, or use "
                f"layer.tables['{name}'].assign."
            )
        values[name] = _values_of(tables[name], given[name], rows.get(name))
    return values


def _values_of(table: TableState, value: Any, numbers: Any) -> Values:
    spec, name = table.spec, table.spec.name
    parts: dict[str, Callable[[np.ndarray], tf.Tensor]] = {}
    if isinstance(value, TableState):
        if value.spec.keys is not None or PARAMETERS not in value.variables:
            raise ValueError(
                f"Table '{name}': table '{value.spec.name}' has DynamicKeys, "
                "or isn't made yet."
            )
        shape = (value.spec.vocabulary_size, value.spec.dim)
        parts = {
            key: _reader(value, key, value is table)
            for key in table.saved
            if key in value.saved
            and table.saved[key].shape[1:] == value.saved[key].shape[1:]
        }
        numbers = np.arange(shape[0]) if numbers is None else numbers
    else:
        rows = _rows_of(name, value)
        parts[PARAMETERS] = functools.partial(tf.gather, rows)
        shape = tuple(rows.shape)
    wanted = (spec.vocabulary_size, spec.dim)
    if numbers is not None:
        found = np.asarray(numbers)
        if found.shape != wanted[:1] or found.dtype.kind not in "iu":
            raise ValueError(
                f"Table '{name}': rows must be {wanted[0]} integers, one for "
                f"each row, got {found.dtype} of shape {found.shape}."
            )
        numbers = found.astype(np.int64)
        outside = numbers[(numbers < -1) | (numbers >= shape[0])]
        if outside.size:
            raise ValueError(
                f"Table '{name}': rows must be from -1 to {shape[0] - 1}, the "
                f"last row that is given, got {outside[0]}."
            )
        wanted = (shape[0], spec.dim)
    if shape != wanted:
        raise ValueError(
            f"Table '{name}' has the shape {wanted}, and can't be "
            f"given values of shape {shape}."
        )
    return Values(parts, np.arange(shape[0]) if numbers is None else numbers)


def _reader(
    table: TableState, key: str, copied: bool
) -> Callable[[np.ndarray], tf.Tensor]:
    """A function that reads rows of a table's part, or of a copy of it."""
    rows = table.saved[key]
    if not copied:
        return lambda numbers: rows.collect_rows(numbers)
    values = rows.collect_rows(range(rows.shape[0]))
    return lambda numbers: tf.gather(values, numbers)


def load(table: TableState, values: Values) -> None:
    """Sets rows of a table."""
    for key, reader in values.readers.items():
        saved = table.saved[key]
        with saved.writing():
            for start, size in blocks(saved.shape.as_list(), tf.float32):
                numbers = values.numbers[start : start + size]
                here = np.flatnonzero(numbers >= 0)
                with tf.device("CPU:0"):
                    rows = tf.cast(reader(numbers[here]), saved.dtype)
                    saved.write_rows(start + here, rows)
    table.assigned()


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
