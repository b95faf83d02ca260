"""The tables of TensorFlow's TPU embeddings, and of TFRS's layers of them.

On embedding cores, and off-TPU, a table is a variable by its name, and a slot a
variable "<table>/<slot>". On SparseCores tables are stacked, and layouts say
which rows are a table's. TFRS's small tables are Keras layers, by the name of a
feature. What Keras trained has Keras's slots.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from tfrs_embed.checkpoint import stored
from tfrs_embed.checkpoint.names import from_key, in_key
from tfrs_embed.compat.private_tensorflow import sparse_core_layout_pb2
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import RULES
from tfrs_embed.sparsecore.layout import flat_rows
from tfrs_embed.tools.conversion.contents import Column, Contents, Table
from tfrs_embed.tools.conversion.keras_slots import KerasSlots
from tfrs_embed.tools.conversion.objects import SavedObjects
from tfrs_embed.tools.conversion.places import (
    KERAS_LAYERS,
    LAYOUTS,
    TPU_EMBEDDING,
)

_SLOTS = tuple(dict.fromkeys(slot for rule in RULES for slot in rule().slots()))


def find(saved: SavedObjects, found: Contents) -> None:
    """Finds the tables of TensorFlow's TPU embeddings."""
    slots = KerasSlots(saved)
    for path in saved.columns:
        if path.split("/")[-1] == LAYOUTS:
            _find_stacked(saved, found, path)
    for path in saved.columns:
        if path not in found.taken:
            _find_table(saved, found, path, slots)
    slots.add_steps(found)


def _find_stacked(saved: SavedObjects, found: Contents, path: str) -> None:
    """Finds the tables of the layouts that have a path."""
    owner = path[: -len(LAYOUTS)]
    layouts = sparse_core_layout_pb2.SparseCoreTableLayouts()
    saved.parse(layouts, saved.keys[path])
    found.taken.add(path)
    for layout in layouts.tables:
        stack = layout.stacked_table_name
        paths = dict(_paths(saved, owner, stack))
        if not paths:
            raise ValueError(
                f"'{found.path}' has a layout of the table "
                f"'{layout.table_name}', but not its stack '{stack}'."
            )
        columns = {
            name: _stacked(saved, path, layout) for name, path in paths.items()
        }
        found.taken.update(paths.values())
        found.tables.append(Table(_layer(owner), layout.table_name, columns))


def _find_table(
    saved: SavedObjects, found: Contents, path: str, slots: KerasSlots
) -> None:
    """Adds the table of a variable, if it is a table's."""
    parts = path.split("/")
    name = from_key(parts[-1])
    own: dict[str, str] = {}
    if parts[-2:-1] == [TPU_EMBEDDING]:
        owner = path[: -len(parts[-1])]
        table, _, slot = name.rpartition("/")
        if slot in _SLOTS and owner + in_key(table) in saved.columns:
            return
        own = dict(_paths(saved, owner, name))
        own.pop(PARAMETERS, None)
    elif parts[-3:-2] == [KERAS_LAYERS] and name == "embeddings":
        owner = "/".join(parts[:-2]) + "/"
        features = saved.names_of("/".join(parts[:-1]))
        name = from_key(parts[-2])
        shared = f" It is of the features {', '.join(features)}."
        found.notes.append(
            f"The small table '{name}' has the name of its feature; that of "
            "the table is not in the checkpoint."
            f"{shared if len(features) > 1 else ''}"
        )
    else:
        return
    if not saved.columns[path].is_table:
        return
    trained = slots.of(path)
    by_keras = bool(trained.slots)
    if not by_keras:
        trained = dataclasses.replace(trained, slots=own)
    slots.add_table(found, _layer(owner), name, path, trained)
    if own and by_keras:
        found.notes.append(
            f"Table '{name}' was trained by Keras, whose slots were taken; its "
            f"own, {', '.join(own)}, are initial ones."
        )


def _paths(
    saved: SavedObjects, owner: str, name: str
) -> Iterator[tuple[str, str]]:
    """The paths of a table's or a stack's parameters and own slots."""
    for column, last in [(PARAMETERS, name)] + [
        (slot, f"{name}/{slot}") for slot in _SLOTS
    ]:
        if owner + in_key(last) in saved.columns:
            yield column, owner + in_key(last)


def _layer(owner: str) -> str:
    """The path of the layer that a TPU embedding belongs to."""
    parts = owner.rstrip("/").split("/")
    while parts and parts[-1] in (TPU_EMBEDDING, KERAS_LAYERS):
        parts.pop()
    return "/".join(parts)


def _stacked(saved: SavedObjects, path: str, layout: Any) -> Column:
    """A table's rows in the stack with a path, without padding.

    Raises a ValueError if the stack's shape is not the layout's.
    """
    shards = layout.num_sparse_cores
    rows, dim = layout.unsharded_shape
    there = list(saved.columns[path].shape)
    stack_rows = shards * layout.total_rows_per_sparse_core_shard
    if len(there) != 2 or there[0] != stack_rows or there[1] < dim:
        raise ValueError(
            f"'{path}' in '{saved.reader.prefix}' has the shape {there}. Its "
            f"layout says that it has {stack_rows} rows, and that '"
            f"{layout.table_name}' takes {dim} columns of it."
        )
    pieces = saved.reader.pieces(saved.keys[path])
    verified = False

    def read(start: int, size: int) -> np.ndarray:
        nonlocal verified
        if not verified:
            stored.verify(pieces)
            verified = True
        values = np.empty((size, dim), np.float32)
        for first in range(start, min(start + shards, start + size)):
            # Row i of the table is on the shard i modulo `shards`, behind row
            # i - shards.
            count = len(range(first, start + size, shards))
            row = int(flat_rows(layout, first))
            stack = stored.read_rows(pieces, row, count)
            values[first - start :: shards] = stack[:, :dim]
        return values

    return Column((rows, dim), read)
