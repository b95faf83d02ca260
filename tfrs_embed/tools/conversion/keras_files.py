"""Tables in the files of Keras: `.keras`, `.weights.h5` and the older `.h5`.

A `.keras` file is a zip archive with a `.weights.h5` as a member. In that file
a layer is a group by its class or attribute. A layer of keras_rs has the layers
of its tables in a group below its own.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import zipfile
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from tfrs_embed.configs.tables import DTYPES
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion import keras_rs, own_files
from tfrs_embed.tools.conversion.contents import (
    Column,
    Contents,
    Other,
    Table,
)
from tfrs_embed.tools.conversion.own_files import NAME, VARIABLES

_HDF5, _ZIP = b"\x89HDF\r\n\x1a\n", b"PK\x03\x04"
_MEMBER = "model.weights.h5"
_BLOCK = 1 << 20


def is_file(path: str) -> bool:
    """Whether a path is a file of Keras."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_HDF5)).startswith((_HDF5, _ZIP))


def read(path: str) -> Contents:
    """Finds the tables in a file; raises a ValueError if it is damaged."""
    datasets: dict[str, h5py.Dataset] = {}

    def add(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            datasets[name] = item

    file = _open(path)
    file.visititems(add)
    columns = {
        name: _column(dataset)
        for name, dataset in datasets.items()
        if dataset.dtype.kind in "fi"
    }
    found = Contents(path)
    own_files.find(file, columns, found)
    of_keras = [table.of_keras for table in found.tables]
    _find_keras_rs(file, columns, found)
    of_keras_rs = len(found.tables) > len(of_keras)
    if of_keras_rs or any(of_keras):
        found.notes.append(
            "Slots of Keras's optimizers have no names in its files, and are "
            "not taken; a tf.train.Checkpoint of the compiled model has them."
        )
    writers = {
        "tfrs_embed": not all(of_keras),
        "keras_rs": of_keras_rs,
        "Keras": any(of_keras),
    }
    written = " and ".join(each for each, wrote in writers.items() if wrote)
    if written:
        found.format = f"{written} in a file of Keras"
    found.others = [
        Other(name, dataset.shape, dataset.dtype.name, dataset.nbytes)
        for name, dataset in datasets.items()
        if name not in found.taken
    ]
    _name_layers(file, found)
    return found


def _open(path: str) -> h5py.File:
    try:
        if not zipfile.is_zipfile(path):
            return h5py.File(path, "r")
        archive = zipfile.ZipFile(path)
        if _MEMBER not in archive.namelist():
            raise ValueError(
                f"'{path}' is no model of Keras: it has no '{_MEMBER}'."
            )
        # Reading to the end verifies the checksum.
        with archive.open(_MEMBER) as member:
            while member.read(_BLOCK):
                pass
        return h5py.File(archive.open(_MEMBER), "r")
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"'{path}' can't be read: {error}") from error


def _column(dataset: h5py.Dataset) -> Column:
    """A dataset of floats or integers as a column."""
    name, is_float = dataset.dtype.name, dataset.dtype.kind == "f"
    known = name in DTYPES or not is_float

    def read(start: int, size: int) -> np.ndarray:
        if not dataset.shape:
            return np.asarray(dataset[()])
        rows = dataset[start : start + size]
        return np.asarray(rows, np.float32) if is_float else rows

    dtype = tf.as_dtype(name) if known else tf.float32
    return Column(dataset.shape, read, dtype)


def _find_keras_rs(
    file: h5py.File, columns: Mapping[str, Column], found: Contents
) -> None:
    """Finds the tables of keras_rs's layers."""
    for path, column in columns.items():
        layer, holder, table = path.partition(f"/{keras_rs.LAYERS}/")
        group, _, variable = table.partition("/")
        if holder and variable == f"{VARIABLES}/0" and column.is_table:
            name = _name(file, f"{layer}/{keras_rs.LAYERS}/{group}")
            found.tables.append(Table(layer, name, {PARAMETERS: column}))
            found.taken.add(path)


def _name_layers(file: h5py.File, found: Contents) -> None:
    """Gives layers their names instead of their groups.

    Layers of one name keep their groups.
    """
    names = {table.layer: _name(file, table.layer) for table in found.tables}
    count = collections.Counter(names.values())
    layers = {
        group: name if count[name] == 1 else group
        for group, name in names.items()
    }
    found.tables = [
        dataclasses.replace(table, layer=layers[table.layer])
        for table in found.tables
    ]
    found.steps = {layers[group]: step for group, step in found.steps.items()}


def _name(file: h5py.File, group: str) -> str:
    """The name of a group's layer in Keras, or else the group's name."""
    variables = file.get(f"{group}/{VARIABLES}")
    named = variables.attrs.get(NAME) if variables is not None else None
    return str(named or group.rpartition("/")[2])
