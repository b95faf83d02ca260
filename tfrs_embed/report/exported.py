"""The part of a page that an exported model has."""

from __future__ import annotations

import os

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.conversion.contents import (
    Column,
    Contents,
    Table,
)
from tfrs_embed.checkpoint.conversion.objects import (
    VALUE,
    Objects,
    others,
)
from tfrs_embed.checkpoint.rows import KEYS
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.report import values
from tfrs_embed.report.measured import measure_tables
from tfrs_embed.report.page import Part
from tfrs_embed.serving.rows import SCALE


def is_exported(path: str) -> bool:
    """Whether a path is that of a SavedModel's folder."""
    return tf.io.gfile.exists(os.path.join(path, "saved_model.pb"))


def exported(path: str) -> Part:
    """Reads an exported model, and makes its part of a page.

    Args:
        path: the SavedModel's folder.

    Returns:
        The part.

    Raises:
        ValueError: it has no tables that `tfrs_embed.serving.export` writes.
        tf.errors.OpError: it is damaged.
    """
    contents = _read(path)
    if not contents.tables:
        raise ValueError(
            f"'{path}' is a SavedModel without tables that "
            "tfrs_embed.serving.export wrote."
        )
    tables = measure_tables(contents)
    sections = [values.sizes(tables), values.norms(tables)]
    rest = values.others(contents)
    if rest is not None:
        sections.append(rest)
    return Part(
        "Exported model",
        contents.path,
        (("written by", contents.format), *values.facts(tables)),
        tuple(sections),
    )


def _read(path: str) -> Contents:
    """The tables of an exported model, as those of a checkpoint."""
    reader = BundleReader(os.path.join(path, "variables", "variables"))
    objects = Objects(reader)
    tables, taken = [], set()
    for layer, of_layer in _children(objects, 0, "tables").items():
        for name, node in objects.nodes[of_layer].items():
            found = {
                child: objects.variables[number]
                for child, number in objects.nodes[node].items()
                if number in objects.variables
            }
            if PARAMETERS in found:
                tables.append(_table(reader, layer, name, found))
                taken |= set(found.values())
    return Contents(
        path,
        "tfrs_embed.serving.export",
        tuple(tables),
        {},
        others(reader, taken),
    )


def _children(objects: Objects, node: int, name: str) -> dict[str, int]:
    """The children of a node's child; none if there is no such child."""
    if not objects.nodes or name not in objects.nodes[node]:
        return {}
    return dict(objects.nodes[objects.nodes[node][name]])


def _table(
    reader: BundleReader, layer: str, name: str, variables: dict[str, str]
) -> Table:
    keys = {child: path + VALUE for child, path in variables.items()}

    def stored(child: str, start: int, size: int) -> np.ndarray:
        rows = reader.read_rows(keys[child], start, size)
        return np.asarray(tf.cast(rows, tf.float32))

    def read(start: int, size: int) -> np.ndarray:
        rows = stored(PARAMETERS, start, size)
        return rows * stored(SCALE, start, size) if SCALE in keys else rows

    def read_scale(start: int, size: int) -> np.ndarray:
        return stored(SCALE, start, size)

    columns = {
        child: Column(
            tuple(reader.shapes[keys[child]]),
            read if child == PARAMETERS else read_scale,
            reader.dtypes[keys[child]],
        )
        for child in (PARAMETERS, SCALE)
        if child in keys
    }

    def read_keys() -> np.ndarray:
        return np.asarray(reader.read(keys[KEYS]))

    return Table(layer, name, columns, read_keys if KEYS in keys else None)
