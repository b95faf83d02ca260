"""The tables of models that `tfrs_embed.serving.export` wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.rows import KEYS, SCALE
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion.contents import Column, Contents, Table
from tfrs_embed.tools.conversion.objects import VALUE, Objects, numbers, others

FORMAT = "tfrs_embed.serving.export"


def is_saved_model(path: str) -> bool:
    """Whether a path is that of a SavedModel's folder."""
    return tf.io.gfile.exists(os.path.join(path, "saved_model.pb"))


def variables_of(path: str) -> str:
    """The path of the checkpoint that a SavedModel's folder has."""
    return os.path.join(path, "variables", "variables")


def read(path: str, reader: BundleReader, objects: Objects) -> Contents | None:
    """Reads the tables of an exported model.

    Args:
        path: the SavedModel's folder.
        reader: its variables.
        objects: the objects that it is of.

    Returns:
        The tables, those of int8 with a column of factors; None: it is none
        that `export` wrote.
    """
    tables, taken, notes = [], set(), []
    for layer, name, found in _tables(objects):
        tables.append(_table(reader, layer, name, found))
        taken |= set(found.values())
        if name == "table":
            notes.append(
                f"Table 'table' of '{layer}' is taken for one of a "
                "DynamicEmbedding. If the layer is an All2AllDenseEmbedding, "
                f"convert it with --table {layer}/table= ."
            )
    if not tables:
        return None
    notes.append("An exported model has neither slots nor a step.")
    return Contents(
        path, FORMAT, tuple(tables), {}, others(reader, taken), tuple(notes)
    )


def _tables(objects: Objects) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Layers, tables and the paths of these by name."""
    nodes = objects.nodes
    if not nodes or "tables" not in nodes[0]:
        return
    layers = nodes[nodes[0]["tables"]]
    if layers.get("step") in objects.variables:
        return  # It is a layer, of this name.
    for layer, of_layer in layers.items():
        for name, node in nodes[of_layer].items():
            found = {
                child: objects.variables[number]
                for child, number in nodes[node].items()
                if number in objects.variables
            }
            if PARAMETERS in found:
                yield layer, name, found


def _table(
    reader: BundleReader, layer: str, name: str, paths: dict[str, str]
) -> Table:
    def stored(child: str, start: int, size: int) -> np.ndarray:
        rows = reader.read_rows(paths[child] + VALUE, start, size)
        return np.asarray(tf.cast(rows, tf.float32))

    def read(start: int, size: int) -> np.ndarray:
        rows = stored(PARAMETERS, start, size)
        return rows * stored(SCALE, start, size) if SCALE in paths else rows

    def read_scale(start: int, size: int) -> np.ndarray:
        return stored(SCALE, start, size)

    columns = {
        child: Column(
            tuple(reader.shapes[paths[child] + VALUE]),
            read if child == PARAMETERS else read_scale,
            reader.dtypes[paths[child] + VALUE],
        )
        for child in (PARAMETERS, SCALE)
        if child in paths
    }
    keys = numbers(reader, paths[KEYS]) if KEYS in paths else None
    return Table(layer, name, columns, keys)
