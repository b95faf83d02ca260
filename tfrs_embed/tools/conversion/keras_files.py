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
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Mapping
from typing import Any

import h5py
import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.stored_pieces import most_bytes
from tfrs_embed.compat import hdf5
from tfrs_embed.configs.tables import DTYPES
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.command_line import InputError
from tfrs_embed.tools.conversion import keras_rs
from tfrs_embed.tools.conversion.contents import (
    Column,
    Contents,
    PlainVariable,
    Table,
)

_HDF5, _ZIP = b"\x89HDF\r\n\x1a\n", b"PK\x03\x04"
_MEMBER = "model.weights.h5"
_BLOCK = 1 << 20
#: What Python's zipfile and h5py raise of files that they can't read. A
#: RuntimeError: the member is encrypted, or compressed in an unknown way.
_UNREADABLE = (
    *(EOFError, OSError, RuntimeError, ValueError),
    *(struct.error, zipfile.BadZipFile, zlib.error),
)
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
    try:
        file = _open(path)
        items = hdf5.objects(file)
    except _UNREADABLE as error:
        raise ValueError(f"'{path}' can't be read: {error}") from error
    datasets = {n: i for n, i in items.items() if isinstance(i, h5py.Dataset)}
    _check_readable(path, file, datasets)
    found = Contents(path)
    for name, dataset in datasets.items():
        if match := _KERAS_RS.fullmatch(name):
            place = match[1], _name(items, name.removesuffix("/vars/0"))
        elif match := _EMBEDDING.fullmatch(name):
            place = match[1], ""
        else:
            continue
        if dataset.ndim == 2 and dataset.shape[1] and dataset.dtype.kind == "f":
            columns = {PARAMETERS: _column(name, dataset)}
            found.add(Table(*place, columns, of_keras=not place[1]))
    found.others = [
        PlainVariable(name, dataset.shape, dataset.dtype.name, dataset.nbytes)
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
    _name_layers(items, found)
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
    if not zipfile.is_zipfile(path):
        return h5py.File(path, "r")
    archive = zipfile.ZipFile(path)
    if _MEMBER not in archive.namelist():
        raise ValueError(f"it has no '{_MEMBER}', as models of Keras do.")
    there = archive.getinfo(_MEMBER)
    if there.file_size > most_bytes(there.compress_size):
        raise ValueError(
            f"'{_MEMBER}' has {there.compress_size} bytes in it, and "
            f"would inflate to {there.file_size}: unpack it, if you trust it."
        )
    # HDF5 reads in any order, for which zipfile would inflate the member again
    # and again.
    compressed = there.compress_type != zipfile.ZIP_STORED
    copy = tempfile.TemporaryFile() if compressed else None  # noqa: SIM115
    with archive.open(there) as member:
        # Reading to the end verifies the checksum.
        while block := member.read(_BLOCK):
            if copy is not None:
                copy.write(block)
    return h5py.File(copy or archive.open(there), "r")


def _column(path: str, dataset: h5py.Dataset) -> Column:
    """A dataset of floats as a column."""

    def read(start: int, size: int) -> np.ndarray:
        return np.asarray(dataset[start : start + size], np.float32)

    name = dataset.dtype.name
    dtype = tf.as_dtype(name) if name in DTYPES else tf.float32
    return Column(dataset.shape, read, dtype, path)


def _name_layers(items: Mapping[str, Any], found: Contents) -> None:
    """Gives layers their names instead of their groups.

    Layers of one name keep their groups.
    """
    names = {table.layer: _name(items, table.layer) for table in found.tables}
    count = collections.Counter(names.values())
    for i, table in enumerate(found.tables):
        name = names[table.layer]
        if count[name] == 1:
            found.tables[i] = dataclasses.replace(table, layer=name)


def _name(items: Mapping[str, Any], group: str) -> str:
    """The name of a group's layer in Keras, or else the group's name."""
    variables = items.get(f"{group}/vars")
    named = "" if variables is None else hdf5.text(variables, "name")
    return named or group.rpartition("/")[2]
