"""The tables of models that `tfrs_embed.serving.export` wrote."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.rows import KEYS, SCALE
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion.contents import Column, Contents, Table
from tfrs_embed.tools.conversion.objects import SavedObjects

FORMAT = "tfrs_embed.serving.export"


def is_saved_model(path: str) -> bool:
    """Whether a path is a SavedModel's folder."""
    return tf.io.gfile.exists(os.path.join(path, "saved_model.pb"))


def find(saved: SavedObjects, found: Contents) -> None:
    """Finds the tables of an exported model.

    A table with int8 rows has a column of factors besides its parameters.
    """
    for layer, name, paths in _tables(saved):
        stored = {each: saved.columns[path] for each, path in paths.items()}
        columns = {n: stored[n] for n in (PARAMETERS, SCALE) if n in stored}
        if SCALE in stored:
            columns[PARAMETERS] = _scaled(stored[PARAMETERS], stored[SCALE])
        parts = {KEYS: stored[KEYS]} if KEYS in stored else {}
        found.tables.append(Table(layer, name, columns, parts))
        found.taken.update(paths.values())
        if name == "table":
            found.notes.append(
                f"Table 'table' of '{layer}' is read as a DynamicEmbedding's. "
                "If the layer is an All2AllDenseEmbedding, convert it with "
                f"--table {layer}/table= ."
            )
    if found.tables:
        found.notes.append("An exported model has neither slots nor a step.")


def _tables(saved: SavedObjects) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Layers, tables, and the paths of tables' variables by name."""
    nodes = saved.nodes
    if not nodes or "tables" not in nodes[0]:
        return
    layers = nodes[nodes[0]["tables"]]
    if layers.get("step") in saved.variables:
        return  # "tables" is the name of a layer.
    for layer, of_layer in layers.items():
        for name, node in nodes[of_layer].items():
            paths = {
                child: saved.variables[number]
                for child, number in nodes[node].items()
                if number in saved.variables
            }
            if PARAMETERS in paths:
                yield layer, name, paths


def _scaled(rows: Column, scale: Column) -> Column:
    """Rows of int8, multiplied by their factors."""

    def read(start: int, size: int) -> np.ndarray:
        return rows.read(start, size) * scale.read(start, size)

    return Column(rows.shape, read, rows.dtype)
