"""Tables in Keras's files, `.keras` and `.weights.h5`: of Keras and keras_rs.

A `.keras` file is a zip archive with a `.weights.h5` as a member. In that file
a layer is a group, named after the layer's class or attribute. A layer of
keras_rs has the layers of its tables in a group below its own.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import re
import zipfile
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from tfrs_embed.configs.tables import DTYPES
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.command_line import InputError
from tfrs_embed.tools.conversion import keras_rs
from tfrs_embed.tools.conversion.contents import (
    Column,
    Contents,
    Other,
    Table,
)

_HDF5, _ZIP = b"\x89HDF\r\n\x1a\n", b"PK\x03\x04"
_MEMBER = "model.weights.h5"
_BLOCK = 1 << 20
_EMBEDDING = re.compile(r"((?:.*/)?embedding(?:_\d+)?)/vars/0")
_KERAS_RS = re.compile(rf"(.+)/{keras_rs.LAYERS}/([^/]+)/vars/0")
# Tables of this package's layers and TFRS's.
_UNREAD = re.compile(
    rf"(?:.*/)?(?:(?:tpu_embedding|_engine_layer)/vars/.+/{PARAMETERS}"
    r"|(?:_keras_layers|keras_embedding_layers)/.+)"
)


def is_file(path: str) -> bool:
    """Whether a path is a file of Keras."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_HDF5)).startswith((_HDF5, _ZIP))


def read(path: str) -> Contents:
    """Finds the tables in a file.

    Raises:
        InputError: the file is of Keras's older format, or has tables of other
            layers.
        ValueError: the file is damaged.
    """
    datasets: dict[str, h5py.Dataset] = {}

    def add(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            datasets[name] = item

    file = _open(path)
    file.visititems(add)
    _check_readable(path, file, datasets)
    found = Contents(path)
    for name, dataset in datasets.items():
        if match := _KERAS_RS.fullmatch(name):
            place = match[1], _name(file, name.removesuffix("/vars/0"))
        elif match := _EMBEDDING.fullmatch(name):
            place = match[1], ""
        else:
            continue
        if dataset.ndim == 2 and dataset.shape[1] and dataset.dtype.kind == "f":
            columns = {PARAMETERS: _column(name, dataset)}
            found.add(Table(*place, columns, of_keras=not place[1]))
    found.others = [
        Other(name, dataset.shape, dataset.dtype.name, dataset.nbytes)
        for name, dataset in datasets.items()
        if name not in found.taken
    ]
    if found.tables:
        of_keras = {table.of_keras for table in found.tables}
        names = ["Keras" if each else "keras_rs" for each in sorted(of_keras)]
        found.format = f"{' and '.join(names)} in a file of Keras"
        found.notes.append(
            "Slots of Keras's optimizers have no names in its files, and are "
            "not taken; a tf.train.Checkpoint of the compiled model has them."
        )
    _name_layers(file, found)
    return found


def _check_readable(
    path: str, file: h5py.File, datasets: dict[str, h5py.Dataset]
) -> None:
    instead = "load it into its model, and save a tf.train.Checkpoint of that."
    if "model_weights" in file or any("layer_names" in a for a in file.attrs):
        raise InputError(
            f"'{path}' is in Keras's older HDF5 format, which is not read: "
            f"{instead}"
        )
    for name in datasets:
        if _UNREAD.fullmatch(name):
            raise InputError(
                f"'{path}' has a table of tfrs_embed or TFRS, '{name}'. Such "
                f"tables are not read from Keras's files: {instead}"
            )


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


def _column(path: str, dataset: h5py.Dataset) -> Column:
    """A dataset of floats as a column."""

    def read(start: int, size: int) -> np.ndarray:
        return np.asarray(dataset[start : start + size], np.float32)

    name = dataset.dtype.name
    dtype = tf.as_dtype(name) if name in DTYPES else tf.float32
    return Column(dataset.shape, read, dtype, path)


def _name_layers(file: h5py.File, found: Contents) -> None:
    """Gives layers their names instead of their groups.

    Layers of one name keep their groups.
    """
    names = {table.layer: _name(file, table.layer) for table in found.tables}
    count = collections.Counter(names.values())
    for i, table in enumerate(found.tables):
        name = names[table.layer]
        if count[name] == 1:
            found.tables[i] = dataclasses.replace(table, layer=name)


def _name(file: h5py.File, group: str) -> str:
    """The name of a group's layer in Keras, or else the group's name."""
    variables = file.get(f"{group}/vars")
    named = variables.attrs.get("name") if variables is not None else None
    return str(named or group.rpartition("/")[2])
