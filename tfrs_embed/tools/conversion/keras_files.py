"""Tables in the files of Keras: `.keras`, `.weights.h5` and the older `.h5`.

A `.keras` file is a zip archive that has a `.weights.h5` as a member. In that a
layer is a group by its class or attribute, and keras_rs's attribute that holds
the tables' layers a group below it.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import zipfile
from collections.abc import Iterator
from typing import Any

import h5py

from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion import keras_rs
from tfrs_embed.tools.conversion.contents import Contents, Other, Table
from tfrs_embed.tools.conversion.own_files import (
    NAME,
    VARIABLES,
    OwnTables,
    rows,
)

_HDF5, _ZIP = b"\x89HDF\r\n\x1a\n", b"PK\x03\x04"
_MEMBER = "model.weights.h5"
_BLOCK = 1 << 20


def is_file(path: str) -> bool:
    """Whether a path is that of such a file."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(len(_HDF5)).startswith((_HDF5, _ZIP))


def read(path: str) -> Contents:
    """Reads which tables a file holds, no values yet.

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
    own = OwnTables(file, datasets)
    found = dict(_tables(file, datasets))
    tables = [*own.tables, *found.values()]
    names = {t.layer: _name(file, t.layer) for t in tables}
    # Of several layers of one name, each is known by its group.
    count = collections.Counter(names.values())
    layers = {
        group: name if count[name] == 1 else group
        for group, name in names.items()
    }
    notes = list(own.notes)
    of_keras = any(table.of_keras for table in tables)
    if found or of_keras:
        notes.append(
            "Slots of Keras's optimizers have no names in its files, and are "
            "not taken; a tf.train.Checkpoint of the compiled model has them."
        )
    writers = {
        "tfrs_embed": not all(table.of_keras for table in own.tables),
        "keras_rs": bool(found),
        "Keras": of_keras,
    }
    written = " and ".join(each for each, wrote in writers.items() if wrote)
    return Contents(
        path,
        f"{written} in a file of Keras" if written else "no tables",
        tuple(
            dataclasses.replace(table, layer=layers[table.layer])
            for table in tables
        ),
        {layers[group]: step for group, step in own.steps.items()},
        tuple(
            Other(name, dataset.shape, dataset.dtype.name, dataset.nbytes)
            for name, dataset in datasets.items()
            if name not in found and name not in own.taken
        ),
        tuple(notes),
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
) -> Iterator[tuple[str, Table]]:
    """keras_rs's tables, by the paths of their values."""
    for path, dataset in datasets.items():
        layer, holder, table = path.partition(f"/{keras_rs.LAYERS}/")
        group, _, variable = table.partition("/")
        if not holder or variable != f"{VARIABLES}/0":
            continue
        if len(dataset.shape) == 2 and dataset.dtype.kind == "f":
            name = _name(file, f"{layer}/{keras_rs.LAYERS}/{group}")
            columns = {PARAMETERS: rows(dataset)}
            yield path, Table(layer, name, columns)


def _name(file: h5py.File, group: str) -> str:
    """What Keras calls a layer; its group's name if that isn't told."""
    variables = file.get(f"{group}/{VARIABLES}")
    named = variables.attrs.get(NAME) if variables is not None else None
    return str(named or group.rpartition("/")[2])
