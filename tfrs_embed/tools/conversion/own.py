"""The tables of this package's layers in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from tfrs_embed.checkpoint.names import from_key, unescape
from tfrs_embed.checkpoint.rate import LEARNING_RATE
from tfrs_embed.checkpoint.rows import CANDIDATES, FREQUENCY, KEYS, LAST_USED
from tfrs_embed.configs.tables import DTYPES
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion.contents import Column, Contents, Table
from tfrs_embed.tools.conversion.objects import SavedObjects

#: The ranks of the int64 variables of a table of keys, by name.
RANKS = {KEYS: 1, FREQUENCY: 1, LAST_USED: 1, CANDIDATES: 2}


def find(saved: SavedObjects, found: Contents) -> None:
    """Finds the tables of this package's layers."""
    of_tables: dict[tuple[str, str], dict[str, str]] = {}
    for path in saved.columns:
        place = _place(path, saved.columns)
        if place is not None:
            of_tables.setdefault(place[:2], {})[place[2]] = path
    for (layer, name), paths in of_tables.items():
        if saved.is_saved_model:
            name = unescape(name)
        if add_table(found, layer, name, paths, saved.columns):
            step = f"{layer}/step" if layer else "step"
            add_step(found, layer, step, saved.columns)


def add_table(
    found: Contents,
    layer: str,
    name: str,
    paths: Mapping[str, str],
    columns: Mapping[str, Column],
) -> bool:
    """Adds a table of `paths`, by name, of `columns`; returns whether it is.

    Raises a ValueError if keys or a counter are of a wrong dtype or rank.
    """
    table: dict[str, Column] = {}
    parts: dict[str, Column] = {}
    rate = None
    taken = set()
    for each in dict.fromkeys((PARAMETERS, KEYS, *paths)):
        path = paths.get(each, "")
        column = columns.get(path)
        if column is None:
            continue
        rank = len(column.shape)
        if each in RANKS and column.dtype == tf.int64 and rank == RANKS[each]:
            parts[each] = column
        elif each in RANKS and PARAMETERS in paths:
            raise ValueError(
                f"'{path}' in '{found.path}' is {column.dtype.name} of shape "
                f"{list(column.shape)}, not int64 of rank {RANKS[each]}, as "
                f"{each} are."
            )
        elif each == LEARNING_RATE and not rank and column.dtype.is_floating:
            rate = float(column.number())
        elif _is_column(each, column):
            table[each] = column
        else:
            continue
        taken.add(path)
    if PARAMETERS not in table:
        return False
    found.tables.append(Table(layer, name, table, parts, rate))
    found.taken |= taken
    return True


def add_step(
    found: Contents, layer: str, path: str, columns: Mapping[str, Column]
) -> None:
    """Sets a layer's step, if `path` is that of an integer."""
    column = columns.get(path)
    if column and not column.shape and column.dtype.is_integer:
        found.steps[layer] = int(column.number())
        found.taken.add(path)


def _is_column(name: str, column: Column) -> bool:
    """Whether a variable may be a table's parameters or slot."""
    if name == PARAMETERS:
        return column.is_table and column.dtype.name in DTYPES
    by_row = len(column.shape) == 1
    return column.dtype == tf.float32 and (by_row or column.is_table)


def _place(
    path: str, columns: Mapping[str, Column]
) -> tuple[str, str, str] | None:
    """The layer, the table and the name of a table's variable; else None."""
    parts = path.split("/")
    layer = "/".join(parts[:-2])
    if parts[-3:-2] == ["tables"] and not (
        parts[-2] == "table" and _is_layer(layer, columns)
    ):
        return "/".join(parts[:-3]), from_key(parts[-2]), from_key(parts[-1])
    if parts[-2:-1] == ["table"]:
        return layer, "", from_key(parts[-1])
    return None


def _is_layer(path: str, columns: Mapping[str, Column]) -> bool:
    """Whether an object called "tables" is a layer with one table.

    Its step then is a number. The variables of a table "step" are of a higher
    rank.
    """
    step = columns.get(f"{path}/step")
    return step is not None and not step.shape
