"""Files that hold a table's rows and slots on one device."""

from __future__ import annotations

import fcntl
import json
import math
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from absl import logging

from tfrs_embed import kernels
from tfrs_embed.checkpoint.bundle import blocks
from tfrs_embed.checkpoint.names import in_folder
from tfrs_embed.compat import files, progress, strict_json
from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.compat.unmirrored import UnmirroredVariable, make_variable
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.optimizers.rules import Slot
from tfrs_embed.storage.memory import MemoryRows
from tfrs_embed.storage.row_store import TableShare

# What the files are, beside them; and other names that no slot's file has.
_ABOUT = "table.json"
_NEW = f"{_ABOUT}.new"
_LOCK = "lock"
# More than the first file has: a table's name is a file's, too.
_MOST_BYTES = 4096


class FileVariable(UnmirroredVariable):
    """A variable whose memory is a mapped file.

    Attributes:
        files: the table's files, in use as long as this variable lives.
    """

    files: TableFiles


def _by_rows(method: str) -> Callable[..., Any]:
    """Makes a method that writes all rows in place, by one that writes some.

    TensorFlow's would give the variable other memory than the file.
    """

    def write(self: FileVariable, value: Any, *_: Any, **__: Any) -> Any:
        value = tf.convert_to_tensor(value, self.dtype)
        self.shape.assert_is_compatible_with(value.shape)
        for start, size in blocks(value.shape, self.dtype):
            block = value[start : start + size]
            rows = tf.range(start, start + size)
            getattr(self, method)(tf.IndexedSlices(block, rows))
        return self

    return write


for _method, _rows in (
    ("assign", "scatter_update"),
    ("assign_add", "scatter_add"),
    ("assign_sub", "scatter_sub"),
):
    setattr(FileVariable, _method, _by_rows(_rows))


class TableFiles:
    """A table's files on a device, of which this process is the only user.

    Raises:
        ValueError: the files are those of another table, or the table's name is
            too long for a folder's.
        RuntimeError: another layer or process uses them, or there are no
            kernels.
        OSError: they can't be written; or a folder or file in the user's folder
            is a symbolic link, or a folder there is of another user.
    """

    def __init__(self, spec: TableSpec, device: str | None) -> None:
        self._where = f"Table '{spec.name}'"
        self._operations = kernels.operations(device)
        if self._operations is None:
            status = kernels.status()
            raise RuntimeError(
                f"{self._where} has a FileStorage, which needs a CPU and the "
                f"compiled kernels. {'' if status.loaded else status.reason}"
            )
        self.folder = os.path.join(*_folders(spec, device))
        assert spec.storage is not None
        self._max_bytes = spec.storage.max_bytes
        self._bytes = 0
        try:
            files.make_folders(*_folders(spec, device))
            self._lock()
            self._describe(
                {"table": spec.name, "dim": spec.dim, "dtype": spec.dtype}
            )
        except OSError as error:
            raise OSError(
                error.errno,
                f"{self._where}: '{self.folder}' can't have a table's files: "
                f"{error.strerror}.",
            ) from error

    def _lock(self) -> None:
        # The lock ends with the process, or when this object is gone.
        path = os.path.join(self.folder, _LOCK)
        lock = files.open_own(path, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            raise RuntimeError(
                f"{self._where}: '{self.folder}' is in use by another layer or "
                "process. Give each its own folder."
            ) from None
        weakref.finalize(self, os.close, lock)

    def _describe(self, about: dict[str, Any]) -> None:
        path = os.path.join(self.folder, _ABOUT)
        if os.path.exists(path):
            with open(files.open_own(path, os.O_RDONLY), "rb") as file:
                text = file.read(_MOST_BYTES)
            try:
                found = strict_json.parse(text, f"'{path}'")
            except ValueError:
                # Another program wrote it.
                found = text[:80].decode(errors="replace")
            if found != about:
                raise ValueError(
                    f"{self._where}: '{self.folder}' has the files of another "
                    f"table: {found!r}, not {about}. Give this one another "
                    "folder, or remove the files."
                )
            logging.warning(
                "%s: rows that an earlier process left in '%s' are "
                "overwritten with initial values. Restore a checkpoint to go "
                "on.",
                self._where,
                self.folder,
            )
            return
        others = set(os.listdir(self.folder)) - {_LOCK, _NEW}
        if others:
            raise ValueError(
                f"{self._where}: '{self.folder}' has other files: "
                f"{sorted(others)[:3]}. Give the table another folder."
            )
        # The process may be killed here, too.
        new = os.path.join(self.folder, _NEW)
        with open(files.open_new(new), "w") as file:
            json.dump(about, file)
        os.replace(new, path)

    def make(
        self,
        name: str,
        shape: Sequence[int],
        dtype: tf.DType,
        initial: float,
        full_name: str,
    ) -> tf.Variable:
        """Makes the variable of a file, filled with a number.

        Raises:
            OSError: the disk lacks room, or the file can't be mapped.
        """
        path = os.path.join(self.folder, in_folder(name, (_ABOUT, _NEW, _LOCK)))
        size = math.prod(shape) * dtype.size
        self._bytes += size
        if self._max_bytes is not None and self._bytes > self._max_bytes:
            raise ValueError(
                f"{self._where}: its files would have at least "
                f"{format_bytes(self._bytes)} in '{self.folder}', more than "
                f"max_bytes={self._max_bytes}."
            )
        # Not cut off: a variable that outlives its layer may have it mapped.
        with open(files.open_new(path), "wb") as file:
            # All of the room: later a full disk would kill the process.
            try:
                if size:
                    os.posix_fallocate(file.fileno(), 0, size)
            except OSError as error:
                os.remove(path)
                raise OSError(
                    error.errno,
                    f"{self._where}: '{path}' can't be made, it would have "
                    f"{format_bytes(size)}: {error.strerror}.",
                ) from error
        try:
            rows = self._operations.tfrs_embed_mapped_rows(
                path, T=dtype, shape=shape, shared=True
            )
        except tf.errors.OpError as error:
            os.remove(path)
            raise OSError(
                f"{self._where}: '{path}' can't be mapped into memory; some "
                f"network file systems can't do that. {error.message}"
            ) from error
        variable = make_variable(rows, full_name, kind=FileVariable)
        variable.files = self
        del rows  # Else the first update would copy the table.
        if initial:
            with progress.Task("Filling", f"'{path}'", size) as task:
                for start, count in blocks(shape, dtype):
                    block = [count, *shape[1:]]
                    variable.scatter_update(
                        tf.IndexedSlices(
                            tf.fill(block, tf.cast(initial, dtype)),
                            tf.range(start, start + count),
                        )
                    )
                    task.advance(math.prod(block) * dtype.size)
        return variable


class FileRows(MemoryRows):
    """Keeps tables with a `FileStorage` in mapped files, others in memory."""

    def build(self, tables: Sequence[TableShare]) -> None:
        self._files: dict[str, TableFiles] = {}
        super().build(tables)
        self._files = {}  # They live as long as their variables.

    def read_ahead(self, table: str, ids: tf.Tensor) -> list[tf.Operation]:
        handles = [v.handle for v in self._variables[table].values()]
        operations = kernels.operations(self.device)
        return [operations.tfrs_embed_read_ahead(handles, ids)]

    def _variable(
        self, table: TableShare, name: str, slot: Slot, dtype: tf.DType
    ) -> tf.Variable:
        spec = table.spec
        if spec.storage is None:
            return super()._variable(table, name, slot, dtype)
        if spec.name not in self._files:
            self._files[spec.name] = TableFiles(spec, self.device)
        return self._files[spec.name].make(
            name,
            [table.rows, *slot.row(spec.dim)],
            dtype,
            slot.initial,
            f"{spec.name}/{name}",
        )


def pages_in_memory(table: Any, ids: Any) -> tuple[int, int]:
    """Counts the pages of rows and slots, and those in memory.

    `table` is a `TableState`. The pages are of rows by their numbers, [n], that
    this process holds. A page counts once.
    """
    counts = [(0, 0)]
    for part, store in table.sources:
        rows, here = part.locate(tf.cast(ids, tf.int64))
        variables = store.variables(table.spec.name).values()
        counted = kernels.operations(store.device).tfrs_embed_pages_in_memory(
            [v.handle for v in variables], tf.boolean_mask(rows, here)
        )
        counts.append(counted.numpy())
    pages, in_memory = np.sum(counts, 0).tolist()
    return pages, in_memory


def in_memory(table: TableSpec) -> tuple[int, int]:
    """Returns how many bytes of a table's files are in memory, and are dirty.

    The files are those of all devices of this process. Dirty bytes are still
    to be written to the disk.
    """
    assert table.storage is not None
    folder = f" {os.path.join(*_folders(table, None)[:2])}/"
    found = {"Rss": 0, "Shared_Dirty": 0, "Private_Dirty": 0}
    with open("/proc/self/smaps") as file:
        mine = False
        for line in file:
            name, _, value = line.partition(":")
            if " " in name:  # A mapping's first line, which ends with its file.
                mine = folder in line
            elif mine and name in found:
                found[name] += 1024 * int(value.split()[0])
    return found["Rss"], found["Shared_Dirty"] + found["Private_Dirty"]


def _folders(table: TableSpec, device: str | None) -> tuple[str, str, str]:
    """The user's folder, the table's in it, and the device's in that."""
    assert table.storage is not None
    return (
        os.path.realpath(table.storage.folder),
        in_folder(table.name),
        _device_name(device),
    )


def _device_name(device: str | None) -> str:
    """A name for a device, unique among the workers of a cluster."""
    resolver = tf.distribute.get_strategy().cluster_resolver
    worker = 0 if resolver is None else resolver.task_id or 0
    index = tf.DeviceSpec.from_string(device or "").device_index or 0
    return f"worker-{worker}-device-{index}"
