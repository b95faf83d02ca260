"""The tables of this package's layers in a checkpoint."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.conversion.contents import Column, Table
from tfrs_embed.checkpoint.conversion.objects import (
    VALUE,
    Variables,
    column,
    unescape,
)
from tfrs_embed.checkpoint.rate import LEARNING_RATE
from tfrs_embed.configs import DTYPES


def find(
    reader: BundleReader, variables: Variables
) -> tuple[list[Table], dict[str, int], set[str]]:
    """Finds the tables of this package's layers.

    Args:
        reader: the checkpoint.
        variables: the variables' shapes and dtypes by path.

    Returns:
        The tables; the layers' steps by path; and the paths of the variables
        that these are.
    """
    columns: dict[tuple[str, str], dict[str, Column]] = {}
    keys: dict[tuple[str, str], str] = {}
    for path, (shape, dtype) in variables.items():
        place = _place(path, variables)
        if place is None:
            continue
        layer, table, name = place
        if (name, table, dtype) == ("keys", "", tf.int64) and len(shape) == 1:
            keys[layer, table] = path
        elif _is_column(name, shape, dtype):
            mine = columns.setdefault((layer, table), {})
            mine[name] = dataclasses.replace(column(reader, path), dtype=dtype)
    tables, taken = [], set()
    for (layer, name), mine in columns.items():
        if "parameters" not in mine:
            continue
        key = keys.get((layer, name))
        mine = {"parameters": mine.pop("parameters"), **mine}
        read_keys = key and functools.partial(_read_all, reader, key)
        tables.append(Table(layer, name, mine, read_keys or None))
        taken |= {
            path
            for path in variables
            if (place := _place(path, variables)) and place[:2] == (layer, name)
            if place[2] in mine or path == key or place[2] == LEARNING_RATE
        }
    steps = {}
    for layer in {table.layer for table in tables}:
        path = f"{layer}/step" if layer else "step"
        shape, dtype = variables.get(path, ([1], tf.int64))
        if not shape and dtype.is_integer:
            steps[layer] = int(reader.read(path + VALUE))
            taken.add(path)
    return tables, steps, taken


def _is_column(name: str, shape: list[int], dtype: tf.DType) -> bool:
    """Whether a variable may be a table's parameters, or a slot of it."""
    if name == "parameters":
        return len(shape) == 2 and shape[1] > 0 and dtype.name in DTYPES
    # Some slots have a number for each row.
    wide = len(shape) == 1 or (len(shape) == 2 and shape[1] > 0)
    return wide and dtype == tf.float32


def _place(path: str, variables: Variables) -> tuple[str, str, str] | None:
    """A variable's layer, table and name, if it may be a table's.

    Args:
        path: the variable's path.
        variables: all variables.
    """
    parts = path.split("/")
    if (
        len(parts) >= 3
        and parts[-3] == "tables"
        and not (
            parts[-2] == "table" and _is_layer("/".join(parts[:-2]), variables)
        )
    ):
        layer, table = parts[:-3], unescape(parts[-2])
    elif len(parts) >= 2 and parts[-2] == "table":
        layer, table = parts[:-2], ""
    else:
        return None
    return "/".join(layer), table, unescape(parts[-1])


def _is_layer(path: str, variables: Variables) -> bool:
    """Whether "tables" is a layer with one table, and no layer's tables.

    Then it has a step, which tables have not: what they have is of rank 2. Or
    it has keys.
    """
    return any(
        f"{path}/{name}" in variables
        and len(variables[f"{path}/{name}"][0]) == rank
        for name, rank in (("step", 0), ("table/keys", 1))
    )


def _read_all(reader: BundleReader, path: str) -> np.ndarray:
    return reader.read(path + VALUE).numpy()
