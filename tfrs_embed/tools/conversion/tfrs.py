"""The tables of TensorFlow's TPU embeddings, and of TFRS's layers of them.

TensorFlow's object has all tables by name, each with its variables: parameters
and slots. On SparseCores it has stacks of tables in place of tables, and
layouts, which say which rows are a table's. TFRS's small tables are Keras
layers, by the name of a feature. What Keras trained has Keras's slots.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tfrs_embed.checkpoint.names import key_of
from tfrs_embed.compat.private_tensorflow import sparse_core_layout_pb2
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import RULES
from tfrs_embed.sparsecore.layout import flat_rows
from tfrs_embed.tools.conversion.contents import Column, Contents, Table
from tfrs_embed.tools.conversion.keras_slots import KerasSlots
from tfrs_embed.tools.conversion.objects import SavedObjects

# Attributes of TensorFlow's object, and of TFRS's layers.
_TABLES, _LAYOUTS = "_variables", "_sparse_core_table_layouts"
_TPU_EMBEDDING, _KERAS_LAYERS = "_tpu_embedding", "_keras_embedding_layers"
_SLOTS = tuple(dict.fromkeys(slot for rule in RULES for slot in rule().slots()))


def find_tables(saved: SavedObjects, found: Contents) -> None:
    """Finds the tables of TensorFlow's TPU embeddings."""
    slots = KerasSlots(saved)
    for owner, path in saved.paths.items():
        children = saved.nodes[owner]
        tables = saved.nodes[children[_TABLES]] if _TABLES in children else {}
        if _LAYOUTS in children:
            _find_stacked(saved, found, owner, tables)
        else:
            for name, table in tables.items():
                _find_table(saved, found, slots, _layer(path), name, table)
        if _KERAS_LAYERS in children:
            _find_small(saved, found, slots, path, children[_KERAS_LAYERS])
    slots.add_steps(found)


def _find_table(
    saved: SavedObjects,
    found: Contents,
    slots: KerasSlots,
    layer: str,
    name: str,
    table: int,
) -> None:
    """Adds a table that isn't stacked."""
    variables = _variables(saved, table)
    parameters = variables.pop(PARAMETERS, None)
    if parameters and parameters.is_table:
        variable = saved.nodes[table][PARAMETERS]
        slots.add_table(found, layer, name, variable, variables)


def _find_small(
    saved: SavedObjects,
    found: Contents,
    slots: KerasSlots,
    layer: str,
    layers: int,
) -> None:
    """Adds small tables, each the variable of a Keras layer."""
    features: dict[int, list[str]] = {}
    for feature, of_feature in saved.nodes[layers].items():
        features.setdefault(of_feature, []).append(feature)
    for of_table, names in features.items():
        variable = saved.nodes[of_table].get("embeddings", -1)
        column = saved.columns.get(variable)
        if column is None or not column.is_table:
            continue
        shared = f" It is of the features {', '.join(sorted(names))}."
        found.notes.append(
            f"The small table '{names[0]}' has the name of its feature; that "
            "of the table is not in the checkpoint."
            f"{shared if len(names) > 1 else ''}"
        )
        slots.add_table(found, layer, names[0], variable)


def _find_stacked(
    saved: SavedObjects,
    found: Contents,
    owner: int,
    stacks: Mapping[str, int],
) -> None:
    """Adds the tables in stacks, by the layouts beside them."""
    layouts = sparse_core_layout_pb2.SparseCoreTableLayouts()
    name = saved.columns[saved.nodes[owner][_LAYOUTS]].name
    saved.parse(layouts, key_of(name))
    found.taken.add(name)
    for layout in layouts.tables:
        stack = layout.stacked_table_name
        if stack not in stacks:
            raise ValueError(
                f"'{found.path}' has a layout of the table "
                f"'{layout.table_name}', but not its stack '{stack}'."
            )
        columns = {
            name: _stacked(saved, column, layout)
            for name, column in _variables(saved, stacks[stack]).items()
        }
        layer = _layer(saved.paths[owner])
        found.add(Table(layer, layout.table_name, columns))


def _variables(saved: SavedObjects, table: int) -> dict[str, Column]:
    """The parameters and own slots of a table or a stack, in this order."""
    variables = saved.variables(table)
    return {n: variables[n] for n in (PARAMETERS, *_SLOTS) if n in variables}


def _layer(path: str) -> str:
    """The path of the layer that a TPU embedding belongs to."""
    parts = path.split("/")
    while parts and parts[-1] == _TPU_EMBEDDING:
        parts.pop()
    return "/".join(parts)


def _stacked(saved: SavedObjects, stack: Column, layout: Any) -> Column:
    """A table's rows in a variable of its stack, without padding.

    Raises a ValueError if the stack's shape is not the layout's.
    """
    shards = layout.num_sparse_cores
    rows, dim = layout.unsharded_shape
    there = list(stack.shape)
    stack_rows = shards * layout.total_rows_per_sparse_core_shard
    fits = len(there) == 2 and there[0] == stack_rows and 0 < dim <= there[1]
    if not fits or not 0 <= rows <= stack_rows or shards < 1:
        raise ValueError(
            f"'{stack.name}' in '{saved.reader.prefix}' has the shape {there}. "
            f"Its layout says that it has {stack_rows} rows in {shards} parts, "
            f"and that '{layout.table_name}' takes {rows} of them, and {dim} "
            "columns."
        )
    key = key_of(stack.name)

    def read(start: int, size: int) -> np.ndarray:
        values = np.empty((size, dim), np.float32)
        for first in range(start, min(start + shards, start + size)):
            # Row i of the table is on the shard i modulo `shards`, behind row
            # i - shards.
            count = len(range(first, start + size, shards))
            row = int(flat_rows(layout, first))
            rows_there = saved.reader.read_array(key, row, count)
            values[first - start :: shards] = rows_there[:, :dim]
        return values

    return Column((rows, dim), read, name=stack.name)
