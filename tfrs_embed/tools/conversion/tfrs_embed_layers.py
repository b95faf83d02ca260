"""The tables of this package's layers in a checkpoint."""

from __future__ import annotations

import tensorflow as tf

from tfrs_embed.checkpoint.names import unescape
from tfrs_embed.checkpoint.rate import LEARNING_RATE
from tfrs_embed.checkpoint.rows import (
    CANDIDATES,
    FALLBACK,
    FREQUENCY,
    KEYS,
    LAST_TIME,
    LAST_USED,
    SCORE,
)
from tfrs_embed.configs.tables import DTYPES
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion.contents import Column, Contents, Table
from tfrs_embed.tools.conversion.objects import SavedObjects

#: The dtypes and ranks of the parts of a table of keys, by name.
_PARTS = {
    **dict.fromkeys((KEYS, FREQUENCY, LAST_USED, LAST_TIME), (tf.int64, 1)),
    SCORE: (tf.float32, 1),
    CANDIDATES: (tf.int64, 2),
}


def find_tables(saved: SavedObjects, found: Contents) -> None:
    """Finds the tables of this package's layers.

    Raises a ValueError if keys or a counter are of a wrong dtype or rank, or if
    a table was saved in shards alone.
    """
    for table, (owner, name) in _tables(saved).items():
        layer = saved.paths[owner]
        variables = saved.variables(table)
        parameters = variables.pop(PARAMETERS, None)
        if parameters is None:
            _check_shards(saved, found, table)
            continue
        if not parameters.is_table or parameters.dtype.name not in DTYPES:
            continue
        columns, parts = {PARAMETERS: parameters}, {}
        rate = None
        for each, column in variables.items():
            rank, is_float = len(column.shape), column.dtype.is_floating
            if each in _PARTS and (each != SCORE or KEYS in variables):
                _check_part(each, column, found)
                parts[each] = column
            elif each.startswith(FALLBACK) and KEYS in variables:
                parts[each] = column
            elif is_float and rank in (1, 2):
                columns[each] = column
            elif is_float and each == LEARNING_RATE:
                rate = float(column.number())
                found.taken.add(column.name)
        found.add(Table(layer, name, columns, parts, rate))
        step = saved.variables(owner).get("step")
        if step and not step.shape and step.dtype.is_integer:
            found.steps[layer] = int(step.number())
            found.taken.add(step.name)


def _tables(saved: SavedObjects) -> dict[int, tuple[int, str]]:
    """Returns the layer and the name of each object that may be a table."""
    found: dict[int, tuple[int, str]] = {}
    for owner in saved.paths:
        children = saved.nodes[owner]
        # The layer's only table. (A table "table" among several was found
        # before, as its owner is nearer to the root.)
        if "table" in children:
            found.setdefault(children["table"], (owner, ""))
        # "tables" may be the name of a layer, which has a step.
        if "tables" in children and not saved.has_step(children["tables"]):
            for name, table in saved.nodes[children["tables"]].items():
                if saved.is_saved_model:
                    name = unescape(name)
                found.setdefault(table, (owner, name))
    return found


def _check_shards(saved: SavedObjects, found: Contents, table: int) -> None:
    parameters = saved.nodes[table].get(PARAMETERS)
    if parameters is not None and "shard_0" in saved.nodes[parameters]:
        raise ValueError(
            f"'{found.path}' has only shards of the table "
            f"'{saved.paths[table]}', without the numbers of their rows. Give "
            "a tf.train.Checkpoint of the model, or what "
            "tfrs_embed.serving.export writes of it."
        )


def _check_part(name: str, column: Column, found: Contents) -> None:
    dtype, rank = _PARTS[name]
    if (column.dtype, len(column.shape)) != (dtype, rank):
        raise ValueError(
            f"'{column.name}' in '{found.path}' is {column.dtype.name} of "
            f"shape {list(column.shape)}, not {dtype.name} of rank {rank}, as "
            f"{name} are."
        )
