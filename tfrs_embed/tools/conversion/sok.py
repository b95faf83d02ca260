"""Files of NVIDIA's SparseOperationKit: a folder with a few files per variable.

`sok.Saver().dump_to_file`, of SOK 1, writes `<variable>_keys.file`, int64 or
uint32, and `<variable>_values.file`, float32, without headers. `sok.dump`, of
SOK 2, writes `<variable>-key`, `<variable>-weight` and
`<variable>-<optimizer>-<slot>`, each with a header that has the dtype. All
files of a variable have its rows in the same order, which has no meaning.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.rows import KEYS
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion.contents import (
    Column,
    Contents,
    PlainVariable,
    Table,
)
from tfrs_embed.tools.conversion.keras_slots import KERAS_SLOTS

_KEYS_1, _VALUES_1 = "_keys.file", "_values.file"
_KEYS_2, _VALUES_2 = "-key", "-weight"
# A header: the table's name, the kind of values, the slot's name, the dtype.
_NAME_BYTES, _SLOT_BYTES = 256, 32
_HEADER = _NAME_BYTES + 4 + _SLOT_BYTES + 4
_HOLDS_KEYS, _HOLDS_ROWS, _HOLDS_SLOT = range(3)
_DTYPES = ("i4", "i8", "u4", "u8", "f2", "f4", "f8")


@dataclasses.dataclass(frozen=True)
class _File:
    """Numbers of one dtype in a file, behind `offset` bytes."""

    path: str
    offset: int
    dtype: np.dtype

    @property
    def count(self) -> int:
        """How many numbers there are."""
        size = os.path.getsize(self.path) - self.offset
        if size % self.dtype.itemsize:
            raise ValueError(
                f"'{self.path}' is cut off: its {size} bytes are no whole "
                f"number of {self.dtype.name}."
            )
        return size // self.dtype.itemsize

    def all(self) -> np.ndarray:
        """Reads all numbers."""
        return np.fromfile(self.path, self.dtype, offset=self.offset)

    def mapped(self, rows: int) -> np.ndarray:
        """The numbers as [rows, dim], which are read when they are used."""
        if not rows:
            return np.zeros((0, 0), self.dtype)
        shape = (rows, self.count // rows)
        return np.memmap(self.path, self.dtype, "r", self.offset, shape)


def is_folder(path: str) -> bool:
    """Whether a folder has SOK's files."""
    return tf.io.gfile.isdir(path) and any(
        name.endswith((_KEYS_1, _KEYS_2)) for name in tf.io.gfile.listdir(path)
    )


def read(folder: str) -> Contents:
    """Finds the variables of a folder: each becomes a layer's table of keys.

    Raises a ValueError if a variable's files don't fit together, or are not in
    the folder.
    """
    found = Contents(folder, "SOK")
    names = sorted(os.listdir(folder))
    for name in names:
        if name.endswith(_KEYS_1):
            variable = name.removesuffix(_KEYS_1)
            paths = {PARAMETERS: variable + _VALUES_1}
        elif name.endswith(_KEYS_2):
            variable = name.removesuffix(_KEYS_2)
            paths = {PARAMETERS: variable + _VALUES_2}
            for other in names:
                parts = other.split("-")
                if parts[0] == variable and len(parts) == 3:
                    slot = KERAS_SLOTS.get(parts[2])
                    if slot is not None:
                        paths[slot] = other
        else:
            continue
        if paths[PARAMETERS] not in names:
            raise ValueError(
                f"'{folder}' has keys, but no '{paths[PARAMETERS]}'."
            )
        for each in (name, *paths.values()):
            _check_place(folder, each)
        found.taken |= {name, *paths.values()}
        path = os.path.join(folder, name)
        paths = {n: os.path.join(folder, each) for n, each in paths.items()}
        if name.endswith(_KEYS_1):
            files = {PARAMETERS: _File(paths[PARAMETERS], 0, np.dtype("f4"))}
            keys = _File(path, 0, np.dtype("i8"))
        else:
            keys = _headed(path, _HOLDS_KEYS)
            files = {
                slot: _headed(
                    each, _HOLDS_ROWS if slot == PARAMETERS else _HOLDS_SLOT
                )
                for slot, each in paths.items()
            }
        table = _table(variable, keys, files)
        found.tables.append(table)
        if name.endswith(_KEYS_1):
            found.notes.append(
                f"'{path}' is read as int64, with rows {table.shape[1]} wide. "
                "If its keys are uint32, convert them first: numpy.fromfile("
                "path, 'uint32').astype('int64').tofile(path)."
            )
    found.others = [
        PlainVariable(
            name, (), "file", os.path.getsize(os.path.join(folder, name))
        )
        for name in names
        if name not in found.taken
    ]
    return found


def _check_place(folder: str, name: str) -> None:
    """Raises a ValueError if a name is no file of the folder itself."""
    path = os.path.join(folder, name)
    there = os.path.dirname(os.path.realpath(path))
    if not os.path.isfile(path) or there != os.path.realpath(folder):
        raise ValueError(
            f"'{path}' is no file, or a link to one outside of the folder."
        )


def _headed(path: str, holds: int) -> _File:
    """The numbers in a file of SOK 2."""
    with open(path, "rb") as file:
        header = file.read(_HEADER)
    if len(header) < _HEADER:
        raise ValueError(f"'{path}' is cut off: it ends within its header.")
    there = int.from_bytes(header[_NAME_BYTES : _NAME_BYTES + 4], "big")
    dtype = int.from_bytes(header[-4:], "big")
    if there != holds or dtype >= len(_DTYPES):
        raise ValueError(f"'{path}' has no header of SOK's for such a file.")
    return _File(path, _HEADER, np.dtype(_DTYPES[dtype]))


def _table(variable: str, keys: _File, files: Mapping[str, _File]) -> Table:
    """A variable as a table, sorted by key."""
    count = keys.count
    for file in files.values():
        if file.dtype.kind != "f":
            raise ValueError(f"'{file.path}' holds {file.dtype.name}.")
        if (file.count % count if count else file.count) != 0:
            raise ValueError(
                f"'{file.path}' has {file.count} numbers, which do not divide "
                f"among the {count} keys in '{keys.path}'."
            )
    if keys.dtype.kind not in "iu":
        raise ValueError(f"'{keys.path}' holds {keys.dtype.name}, no keys.")
    # Keys are sorted when they are first needed.
    order = functools.cache(functools.partial(_sorted, keys))

    def rows_of(file: _File) -> Column:
        def read(start: int, size: int) -> np.ndarray:
            # Mapped each time: pages that a mapping has read stay in memory.
            places = order()[1][start : start + size]
            return file.mapped(count)[places].astype(np.float32)

        width = file.count // count if count else 0
        return Column((count, width), read)

    def read_keys(start: int, size: int) -> np.ndarray:
        return order()[0][start : start + size]

    return Table(
        variable,
        "",
        {name: rows_of(file) for name, file in files.items()},
        {KEYS: Column((count,), read_keys, tf.int64)},
    )


def _sorted(keys: _File) -> tuple[np.ndarray, np.ndarray]:
    """The keys, ascending, and their positions in the file."""
    values = keys.all()
    if values.size and values.max() > np.iinfo(np.int64).max:
        raise ValueError(
            f"'{keys.path}' has the key {values.max()}, which is no int64."
        )
    order = np.argsort(values, kind="stable")
    values = values[order].astype(np.int64)
    twice = np.flatnonzero(values[1:] == values[:-1])
    if twice.size:
        raise ValueError(
            f"'{keys.path}' has the key {values[twice[0]]} more than once."
        )
    return values, order
