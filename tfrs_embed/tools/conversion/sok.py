"""Files of NVIDIA's SparseOperationKit: a folder, with some files per variable.

`sok.Saver().dump_to_file`, of SOK 1, writes `<variable>_keys.file`, int64 or
uint32, and `<variable>_values.file`, float32, without anything else in them.
`sok.dump`, of SOK 2, writes `<variable>-key`, `<variable>-weight` and
`<variable>-<optimizer>-<slot>`, each behind a header that tells its dtype. In
all of them a variable's rows are in one order, which is no particular one.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import string
from collections.abc import Callable, Mapping
from typing import BinaryIO

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import blocks
from tfrs_embed.checkpoint.rate import LEARNING_RATE
from tfrs_embed.tools.conversion.contents import Column, Contents, Other, Table
from tfrs_embed.tools.conversion.keras_slots import KERAS_SLOTS

_KEYS_1, _VALUES_1 = "_keys.file", "_values.file"
_KEYS_2, _VALUES_2 = "-key", "-weight"
# A header: the table's name, what the file holds, the slot's name, the dtype.
_NAME_BYTES, _SLOT_BYTES = 256, 32
_HEADER = _NAME_BYTES + 4 + _SLOT_BYTES + 4
_HOLDS_KEYS, _HOLDS_ROWS, _HOLDS_SLOT = range(3)
_DTYPES = ("i4", "i8", "u4", "u8", "f2", "f4", "f8")
# The names of our optimizers' slots in SOK's optimizers.
_OPTIMIZERS: Mapping[frozenset[str], tuple[str, Mapping[str, str]]] = {
    frozenset({"accumulators"}): ("Adagrad", {"accumulators": "accumulator"}),
    frozenset({"momenta", "velocities"}): (
        "Adam",
        {"momenta": "m", "velocities": "v"},
    ),
    frozenset({"accumulators", "linears"}): (
        "Ftrl",
        {"accumulators": "accumulator", "linears": "linear"},
    ),
}
# A row that is looked up in a file may have a page of the file read.
_GATHERED = 1 << 14


@dataclasses.dataclass(frozen=True)
class _File:
    """Numbers in a file.

    Attributes:
        path: the file.
        offset: bytes before the first number.
        dtype: their dtype.
    """

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
        """The numbers."""
        try:
            return np.fromfile(self.path, self.dtype, offset=self.offset)
        except MemoryError as error:
            raise MemoryError(f"'{self.path}': {error}") from error

    def mapped(self, rows: int) -> np.ndarray:
        """The numbers as [rows, dim], read where they are looked at."""
        if not rows:
            return np.zeros((0, 0), self.dtype)
        return np.memmap(
            self.path,
            self.dtype,
            "r",
            self.offset,
            (rows, self.count // rows),
        )


def is_folder(path: str) -> bool:
    """Whether a folder has SOK's files."""
    return tf.io.gfile.isdir(path) and any(
        name.endswith((_KEYS_1, _KEYS_2)) for name in tf.io.gfile.listdir(path)
    )


def read(folder: str, dim: int | None = None) -> Contents:
    """Reads what variables a folder of SOK's files has.

    A variable becomes a layer that has a table of keys.

    Args:
        folder: the folder.
        dim: the width of the rows, which files of SOK 1 don't tell; None: what
            it must be if their keys are int64. Files of SOK 2 must have it.

    Raises:
        ValueError: files that belong together don't fit together.
    """
    names = sorted(os.listdir(folder))
    tables, notes, taken = [], [], set()
    for name in names:
        if name.endswith(_KEYS_1):
            variable = name.removesuffix(_KEYS_1)
            values = variable + _VALUES_1
            files = {"parameters": values}
            _check_is_there(folder, values)
            keys, rows, note = _headless(
                os.path.join(folder, name), os.path.join(folder, values), dim
            )
            columns = {"parameters": rows}
            notes += note
        elif name.endswith(_KEYS_2):
            variable = name.removesuffix(_KEYS_2)
            files = {"parameters": variable + _VALUES_2}
            _check_is_there(folder, files["parameters"])
            for other in names:
                parts = other.split("-")
                if parts[0] == variable and len(parts) == 3:
                    slot = KERAS_SLOTS.get(parts[2])
                    if slot is not None:
                        files[slot] = other
            keys = _headed(os.path.join(folder, name), _HOLDS_KEYS)
            columns = {
                slot: _headed(
                    os.path.join(folder, file),
                    _HOLDS_ROWS if slot == "parameters" else _HOLDS_SLOT,
                )
                for slot, file in files.items()
            }
            _check_dim(keys, columns, dim)
        else:
            continue
        taken |= {name, *files.values()}
        tables.append(_table(variable, keys, columns, dim))
    others = [
        Other(name, (), "file", os.path.getsize(os.path.join(folder, name)))
        for name in names
        if name not in taken
    ]
    return Contents(
        folder, "SOK", tuple(tables), {}, tuple(others), tuple(notes)
    )


def _check_is_there(folder: str, name: str) -> None:
    if not os.path.isfile(os.path.join(folder, name)):
        raise ValueError(f"'{folder}' has keys, but no '{name}'.")


def _headless(
    keys: str, values: str, dim: int | None
) -> tuple[_File, _File, list[str]]:
    """A variable's files of SOK 1: the dtype of the keys is to be found."""
    rows = _File(values, 0, np.dtype("f4"))
    size = os.path.getsize(keys)
    notes = []
    dtype: np.dtype = np.dtype("i8")
    if dim is None:
        count = _File(keys, 0, dtype).count
        if count and rows.count % count == 0:
            notes.append(
                f"'{keys}' is taken to hold int64, and its rows to be "
                f"{rows.count // count} wide; if they aren't, say how wide."
            )
    else:
        if rows.count % dim:
            raise ValueError(
                f"'{values}' has {rows.count} numbers, no whole number of rows "
                f"of {dim}."
            )
        fitting = [
            d
            for d in (np.dtype("i8"), np.dtype("u4"))
            if size == rows.count // dim * d.itemsize
        ]
        if not fitting:
            raise ValueError(
                f"'{values}' has {rows.count // dim} rows of {dim}, but "
                f"'{keys}' has {size} bytes, which is neither 8 nor 4 for each."
            )
        dtype = fitting[0]
    return _File(keys, 0, dtype), rows, notes


def _headed(path: str, holds: int) -> _File:
    """A file of SOK 2."""
    with open(path, "rb") as file:
        header = file.read(_HEADER)
    if len(header) < _HEADER:
        raise ValueError(f"'{path}' is cut off: it ends within its header.")
    there = int.from_bytes(header[_NAME_BYTES : _NAME_BYTES + 4], "big")
    dtype = int.from_bytes(header[-4:], "big")
    if there != holds or dtype >= len(_DTYPES):
        raise ValueError(f"'{path}' has no header of SOK's for what it is.")
    return _File(path, _HEADER, np.dtype(_DTYPES[dtype]))


def _check_dim(
    keys: _File, columns: Mapping[str, _File], dim: int | None
) -> None:
    """Checks that the rows in files of SOK 2 are as wide as they should be."""
    if dim is None:
        return
    for file in columns.values():
        if file.count != keys.count * dim:
            raise ValueError(
                f"'{file.path}' has {file.count} numbers for the {keys.count} "
                f"keys in '{keys.path}', which are no rows of {dim}."
            )


def _table(
    variable: str,
    keys: _File,
    columns: Mapping[str, _File],
    dim: int | None,
) -> Table:
    count = keys.count
    for file in columns.values():
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
    order = functools.cache(functools.partial(_sort, keys))
    return Table(
        variable,
        "",
        {
            name: Column(
                (count, file.count // count if count else dim or 0),
                functools.partial(_rows, file, count, order),
            )
            for name, file in columns.items()
        },
        Column(
            (count,), lambda start, size: order()[0][start:][:size], tf.int64
        ),
    )


def _sort(keys: _File) -> tuple[np.ndarray, np.ndarray]:
    """The keys, ascending, and which of the file's they are."""
    values = keys.all()
    try:
        return _sorted(keys, values)
    except MemoryError as error:
        raise MemoryError(f"the keys in '{keys.path}': {error}") from error


def _sorted(keys: _File, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
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


def _rows(
    file: _File,
    count: int,
    order: Callable[[], tuple[np.ndarray, np.ndarray]],
    start: int,
    size: int,
) -> np.ndarray:
    places = order()[1][start : start + size]
    parts = [
        # Mapped anew, as the pages that were read stay in memory.
        file.mapped(count)[places[i : i + _GATHERED]].astype(np.float32)
        for i in range(0, size, _GATHERED)
    ]
    return np.concatenate(parts)


def write(
    folder: str,
    table: Table,
    saver: bool,
    progress: Callable[[int], None],
) -> list[str]:
    """Writes a table as SOK's files.

    Args:
        folder: where to.
        table: the table.
        saver: whether as `sok.Saver` does, or else as `sok.dump`.
        progress: called with numbers of bytes that were written.

    Returns:
        What such files can't have.
    """
    rows = table.shape[0]
    keys = np.arange(rows)
    if table.keys is not None:
        keys = table.keys.read(0, rows)
    slots = table.columns.keys() - {"parameters"}
    name = table.path.replace("/", "_")
    if saver:
        files = {"parameters": name + _VALUES_1}
        _write_all(os.path.join(folder, name + _KEYS_1), b"", keys)
        headers = {"parameters": b""}
    else:
        # As SOK does with its variables' names.
        name = "".join("_" if c in string.punctuation else c for c in name)
        # None of SOK's optimizers has a number for each row.
        whole = all(len(table.columns[slot].shape) == 2 for slot in slots)
        known = _OPTIMIZERS if whole else {}
        optimizer, names = known.get(frozenset(slots), ("", {}))
        files = {"parameters": name + _VALUES_2}
        headers = {"parameters": _header(_HOLDS_ROWS, "", "f4")}
        for slot, theirs in names.items():
            files[slot] = f"{name}-{optimizer}-{theirs}"
            headers[slot] = _header(_HOLDS_SLOT, theirs, "f4")
        header = _header(_HOLDS_KEYS, "", "i8")
        _write_all(os.path.join(folder, name + _KEYS_2), header, keys)
    for column, file_name in files.items():
        with open(os.path.join(folder, file_name), "wb") as file:
            file.write(headers[column])
            _write_rows(file, table.columns[column], progress)
    left = sorted(slots - files.keys())
    if table.learning_rate is not None:
        left.append(LEARNING_RATE)
    return [*left, *table.counters]


def _header(holds: int, slot: str, dtype: str) -> bytes:
    return b"".join(
        [
            b" " * _NAME_BYTES,
            holds.to_bytes(4, "big"),
            slot.rjust(_SLOT_BYTES).encode(),
            _DTYPES.index(dtype).to_bytes(4, "big"),
        ]
    )


def _write_all(path: str, header: bytes, values: np.ndarray) -> None:
    with open(path, "wb") as file:
        file.write(header)
        file.write(values.astype("<i8").data)


def _write_rows(
    file: BinaryIO, column: Column, progress: Callable[[int], None]
) -> None:
    for start, size in blocks(column.shape, tf.float32):
        values = column.read(start, size).astype("<f4", copy=False)
        file.write(np.ascontiguousarray(values).data)
        progress(column.nbytes_of(size))
