"""The tables of models that `tfrs_embed.serving.export` wrote."""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.rows import KEYS, SCALE
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.serving.tables import MAPPED
from tfrs_embed.tools.conversion.contents import Column, Contents, Table
from tfrs_embed.tools.conversion.objects import SavedObjects

FORMAT = "tfrs_embed.serving.export"


def is_saved_model(path: str) -> bool:
    """Whether a path is a SavedModel's folder."""
    return tf.io.gfile.exists(os.path.join(path, "saved_model.pb"))


def find_tables(saved: SavedObjects, found: Contents) -> None:
    """Finds the tables of an exported model.

    A table with int8 or int4 rows has a column of factors besides its
    parameters. Mapped tables raise a ValueError.
    """
    root = saved.nodes[0] if saved.nodes else {}
    # "tables" may be the name of a layer, which has a step.
    if "tables" not in root or saved.has_step(root["tables"]):
        return
    for layer, tables in saved.nodes[root["tables"]].items():
        for name, table in saved.nodes[tables].items():
            stored = saved.variables(table)
            if PARAMETERS + MAPPED in saved.nodes[table]:
                raise ValueError(
                    f"'{found.path}' has the rows of table '{name}' in a "
                    "mapped file, which is no part of the checkpoint: give "
                    "what serving.export writes without mapped=True."
                )
            if PARAMETERS in stored:
                _add(found, layer, name, stored)
    if found.tables:
        found.notes.append("An exported model has neither slots nor a step.")


def _add(
    found: Contents, layer: str, name: str, stored: dict[str, Column]
) -> None:
    columns = {n: stored[n] for n in (PARAMETERS, SCALE) if n in stored}
    if SCALE in stored:
        columns[PARAMETERS] = _scaled(stored[PARAMETERS], stored[SCALE])
    parts = {KEYS: stored[KEYS]} if KEYS in stored else {}
    found.add(Table(layer, name, columns, parts))
    if name == "table":
        found.notes.append(
            f"Table 'table' of '{layer}' is read as a DynamicEmbedding's. If "
            "the layer is an All2AllDenseEmbedding, convert it with "
            f"--table {layer}/table= ."
        )


def _scaled(rows: Column, scale: Column) -> Column:
    """Rows of int8 or int4, multiplied by their factors."""
    shape, dtype = rows.shape, rows.dtype
    if dtype == tf.uint8:
        number, width = shape
        # The last of an odd number of columns has no number beside it: 0.
        odd = number > 0 and width > 0 and rows.read(0, 1)[0, -1] < 16
        shape, dtype = (number, 2 * width - odd), tf.dtypes.experimental.int4

    def read(start: int, size: int) -> np.ndarray:
        values = rows.read(start, size)
        if dtype == tf.dtypes.experimental.int4:
            columns = np.concatenate([values & 15, values >> 4], 1)
            values = columns[:, : shape[1]] - np.float32(8)
        return values * scale.read(start, size)

    return Column(shape, read, dtype, rows.name)
