"""The tables of TensorFlow's TPU embeddings, and of TFRS's layers of them.

On embedding cores, and on no TPU at all, a table is a variable by its name, and
a slot one by "<table>/<slot>". On SparseCores tables are stacked, and layouts
beside them say where each one's rows are. TFRS's small tables are Keras layers,
by a feature's name. Whatever Keras trained has Keras's slots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import stored
from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.names import in_key
from tfrs_embed.compat.private_tensorflow import sparse_core_layout_pb2
from tfrs_embed.optimizers.rules import RULES
from tfrs_embed.sparsecore.layout import flat_rows
from tfrs_embed.tools.conversion.contents import Column, Table
from tfrs_embed.tools.conversion.finder import Finder
from tfrs_embed.tools.conversion.keras_slots import KerasSlots
from tfrs_embed.tools.conversion.objects import (
    VALUE,
    Objects,
    Variables,
    column,
    parse,
    unescape,
)
from tfrs_embed.tools.conversion.places import (
    KERAS_LAYERS,
    LAYOUTS,
    TPU_EMBEDDING,
)

_SLOTS = tuple(dict.fromkeys(slot for rule in RULES for slot in rule().slots()))


class TfrsFinder(Finder):
    """Finds the tables of TFRS's layers in a checkpoint; see the base class."""

    def __init__(
        self, reader: BundleReader, variables: Variables, objects: Objects
    ) -> None:
        super().__init__(reader, variables, objects)
        self._slots = KerasSlots(reader, variables, objects)
        self._counters: dict[str, set[str]] = {}
        for path in variables:
            if path.split("/")[-1] == LAYOUTS:
                self._find_stacked(path)
        for path in variables:
            if path not in self.taken:
                self._find_table(path)
        self._find_steps()

    def _find_stacked(self, path: str) -> None:
        owner = path[: -len(LAYOUTS)]
        layouts = sparse_core_layout_pb2.SparseCoreTableLayouts()
        parse(layouts, self._reader, path + VALUE)
        self.taken.add(path)
        for layout in layouts.tables:
            stack = layout.stacked_table_name
            columns = {}
            for name, path in self._columns(owner, stack):
                columns[name] = _stacked(self._reader, path, layout)
                self.taken.add(path)
            if not columns:
                raise ValueError(
                    f"'{self._reader.prefix}' has a layout of the table "
                    f"'{layout.table_name}', but not its stack '{stack}'."
                )
            self._add(owner, layout.table_name, columns)

    def _find_table(self, path: str) -> None:
        parts = path.split("/")
        name = unescape(parts[-1])
        if len(parts) >= 2 and parts[-2] == TPU_EMBEDDING:
            owner = path[: -len(parts[-1])]
            table, _, slot = name.rpartition("/")
            if slot in _SLOTS and owner + in_key(table) in self._variables:
                return
        elif (
            len(parts) >= 3
            and parts[-3] == KERAS_LAYERS
            and name == "embeddings"
        ):
            owner = "/".join(parts[:-2]) + "/"
            features = self._objects.names_of("/".join(parts[:-1]))
            name = unescape(parts[-2])
            self.notes.append(
                f"The small table '{name}' has the name of its feature; that "
                "of the table is not in the checkpoint."
                + (
                    f" It is of the features {', '.join(features)}."
                    if len(features) > 1
                    else ""
                )
            )
        else:
            return
        shape, dtype = self._variables[path]
        if len(shape) != 2 or not shape[1] or not dtype.is_floating:
            return
        if dtype != tf.float32:
            self.notes.append(f"'{path}' is {dtype.name}, read as float32.")
        found = self._slots.of(path)
        trained = found.slots
        self.notes += found.notes
        self._counters.setdefault(_layer(owner), set()).update(found.counters)
        columns = {"parameters": column(self._reader, path)}
        self.taken.add(path)
        own = {}
        if parts[-2] == TPU_EMBEDDING:
            own = dict(self._columns(owner, name))
            own.pop("parameters")
        if own and trained:
            self.notes.append(
                f"Table '{name}' was trained by Keras, whose slots were taken; "
                f"its own, {', '.join(own)}, are initial ones."
            )
        for slot, variable in (trained or own).items():
            columns[slot] = column(self._reader, variable)
            self.taken.add(variable)
        self._add(owner, name, columns)

    def _columns(self, owner: str, name: str) -> Iterator[tuple[str, str]]:
        """A table's or a stack's parameters and own slots, and their paths."""
        if owner + in_key(name) in self._variables:
            yield "parameters", owner + in_key(name)
        for slot in _SLOTS:
            path = owner + in_key(f"{name}/{slot}")
            if path in self._variables:
                yield slot, path

    def _add(self, owner: str, name: str, columns: dict[str, Column]) -> None:
        self.tables.append(Table(_layer(owner), name, columns))

    def _find_steps(self) -> None:
        for layer, counters in self._counters.items():
            step, paths = self._slots.step(counters)
            if step is not None:
                self.steps[layer] = step
                self.taken |= paths


def _layer(owner: str) -> str:
    """The path of the layer that a TPU embedding belongs to."""
    parts = owner.rstrip("/").split("/")
    while parts and parts[-1] in (TPU_EMBEDDING, KERAS_LAYERS):
        parts.pop()
    return "/".join(parts)


def _stacked(reader: BundleReader, path: str, layout: Any) -> Column:
    """A table's rows in a stack of tables.

    Args:
        reader: the checkpoint.
        path: the stack's path.
        layout: the table's `SparseCoreTableLayout`.

    Returns:
        The rows, without what pads them.

    Raises:
        ValueError: the stack is not what the layout says.
    """
    shards = layout.num_sparse_cores
    rows, dim = layout.unsharded_shape
    there = reader.shapes[path + VALUE]
    stack_rows = shards * layout.total_rows_per_sparse_core_shard
    if len(there) != 2 or there[0] != stack_rows or there[1] < dim:
        raise ValueError(
            f"'{path}' in '{reader.prefix}' has the shape {there}. Its layout "
            f"says that it has {stack_rows} rows, and that '"
            f"{layout.table_name}' takes {dim} columns of it."
        )
    pieces = reader.pieces(path + VALUE)

    def read(start: int, size: int) -> np.ndarray:
        values = np.empty((size, dim), np.float32)
        for first in range(start, min(start + shards, start + size)):
            count = len(range(first, start + size, shards))
            # A shard has every so manyeth row, one behind the other.
            row = int(flat_rows(layout, first))
            found = stored.read_rows(pieces, row, count)
            values[first - start :: shards] = found[:, :dim]
        return values

    verified = False

    def read_verified(start: int, size: int) -> np.ndarray:
        nonlocal verified
        if not verified:
            stored.verify(pieces)
            verified = True
        return read(start, size)

    return Column((rows, dim), read_verified)
