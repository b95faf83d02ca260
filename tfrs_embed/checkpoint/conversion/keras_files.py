"""keras_rs's tables in the files of Keras 3: `.weights.h5` and `.keras`.

The second is a zip archive that has the first as a member. There a layer is a
group by its class or attribute, and its attribute that holds the tables' layers
a group below it.
"""

from __future__ import annotations

import collections
import os
import zipfile
from collections.abc import Iterator
from typing import Any

import h5py
import numpy as np

from tfrs_embed.checkpoint.conversion import keras_rs
from tfrs_embed.checkpoint.conversion.contents import (
    Column,
    Contents,
    Other,
    Table,
)

_HDF5, _ZIP = b"\x89HDF\r\n\x1a\n", b"PK\x03\x04"
_MEMBER = "model.weights.h5"
_BLOCK = 1 << 20
# In a group: its variables, by number, and what Keras calls the layer.
_VARIABLES, _NAME = "vars", "name"


def is_file(path: str) -> bool:
    """Whether a path is that of such a file."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_HDF5)).startswith((_HDF5, _ZIP))


def read(path: str) -> Contents:
    """Reads which tables of keras_rs a file holds, no values yet.

    Args:
        path: the file.

    Raises:
        ValueError: it has no weights, or is damaged.
    """
    datasets: dict[str, h5py.Dataset] = {}

    def add(name: str, item: Any) -> None:
        if isinstance(item, h5py.Dataset):
            datasets[name] = item

    file = _open(path)
    file.visititems(add)
    found = dict(_tables(file, datasets))
    tables = found.values()
    layers = {layer: _name(file[layer]) for layer, _, _ in tables}
    # Of several layers of one name, each is known by its group.
    count = collections.Counter(layers.values())
    return Contents(
        path,
        "keras_rs's layers in a file of Keras" if found else "no tables",
        tuple(
            Table(
                layers[layer] if count[layers[layer]] == 1 else layer,
                name,
                {"parameters": column},
            )
            for layer, name, column in tables
        ),
        {},
        tuple(
            Other(name, dataset.shape, dataset.dtype.name, dataset.nbytes)
            for name, dataset in datasets.items()
            if name not in found
        ),
        (
            (
                "Slots in files of Keras have no names, and are not taken; a "
                "tf.train.Checkpoint of the compiled model has them.",
            )
            if found
            else ()
        ),
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
        # To its end, where the checksum is.
        with archive.open(_MEMBER) as member:
            while member.read(_BLOCK):
                pass
        return h5py.File(archive.open(_MEMBER), "r")
    except (OSError, zipfile.BadZipFile) as error:
        raise ValueError(f"'{path}' can't be read: {error}") from error


def _tables(
    file: h5py.File, datasets: dict[str, h5py.Dataset]
) -> Iterator[tuple[str, tuple[str, str, Column]]]:
    """The layer's group, the name and the values of tables, by their paths."""
    for path, dataset in datasets.items():
        layer, holder, table = path.partition(f"/{keras_rs.LAYERS}/")
        group, _, variable = table.partition("/")
        if not holder or variable != f"{_VARIABLES}/0":
            continue
        if len(dataset.shape) == 2 and dataset.dtype.kind == "f":
            name = _name(file[f"{layer}/{keras_rs.LAYERS}/{group}"])
            yield path, (layer, name, _column(dataset))


def _name(group: h5py.Group) -> str:
    """What Keras calls a layer; its group's name if that isn't told."""
    variables = group.get(_VARIABLES)
    named = variables.attrs.get(_NAME) if variables is not None else None
    return str(named or group.name.rpartition("/")[2])


def _column(dataset: h5py.Dataset) -> Column:
    def read(start: int, size: int) -> np.ndarray:
        return np.asarray(dataset[start : start + size], np.float32)

    rows, dim = dataset.shape
    return Column((rows, dim), read)
