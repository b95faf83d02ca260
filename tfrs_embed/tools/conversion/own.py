"""The tables of this package's layers in a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.rate import LEARNING_RATE
from tfrs_embed.checkpoint.rows import CANDIDATES, FREQUENCY, KEYS, LAST_USED
from tfrs_embed.configs.tables import DTYPES
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion.contents import Table
from tfrs_embed.tools.conversion.objects import (
    VALUE,
    Variables,
    column,
    numbers,
    unescape,
)

#: The rank of what a table of keys has besides rows, int64, by name.
RANKS = {KEYS: 1, FREQUENCY: 1, LAST_USED: 1, CANDIDATES: 2}


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
    found: dict[tuple[str, str], dict[str, str]] = {}
    for path in variables:
        place = _place(path, variables)
        if place is not None:
            found.setdefault(place[:2], {})[place[2]] = path
    tables, taken = [], set()
    for (layer, name), paths in found.items():
        table, mine = _table(reader, variables, layer, name, paths)
        if PARAMETERS in table.columns:
            tables.append(table)
            taken |= mine
    steps = {}
    for layer in dict.fromkeys(table.layer for table in tables):
        path = f"{layer}/step" if layer else "step"
        shape, dtype = variables.get(path, ([1], tf.int64))
        if not shape and dtype.is_integer:
            steps[layer] = int(reader.read(path + VALUE))
            taken.add(path)
    return tables, steps, taken


def _table(
    reader: BundleReader,
    variables: Variables,
    layer: str,
    name: str,
    paths: Mapping[str, str],
) -> tuple[Table, set[str]]:
    """A table of variables by their names, and the paths of those it has."""
    columns, parts, taken = {}, {}, set()
    rate = None
    for each in (PARAMETERS, *(p for p in paths if p != PARAMETERS)):
        path = paths.get(each, "")
        shape, dtype = variables.get(path, ([], tf.string))
        if dtype == tf.int64 and len(shape) == RANKS.get(each):
            parts[each] = numbers(reader, path)
        elif each == LEARNING_RATE and not shape and dtype.is_floating:
            rate = float(reader.read(path + VALUE))
        elif each in RANKS and path and PARAMETERS in paths:
            raise ValueError(
                f"'{path}' in '{reader.prefix}' is {dtype.name} of shape "
                f"{shape}, not int64 of rank {RANKS[each]}, as {each} are."
            )
        elif _is_column(each, shape, dtype):
            columns[each] = dataclasses.replace(
                column(reader, path), dtype=dtype
            )
        else:
            continue
        taken.add(path)
    keys = parts.pop(KEYS, None)
    return Table(layer, name, columns, keys, parts, rate), taken


def _is_column(name: str, shape: list[int], dtype: tf.DType) -> bool:
    """Whether a variable may be a table's parameters, or a slot of it."""
    if name == PARAMETERS:
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

    Then it has a step, a number. What tables have is of a higher rank.
    """
    return f"{path}/step" in variables and not variables[f"{path}/step"][0]
