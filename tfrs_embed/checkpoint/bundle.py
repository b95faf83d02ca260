"""Writes and reads tensors of TensorFlow's checkpoints in blocks of rows.

A tensor is saved as slices of its rows, under one name. TensorFlow restores the
whole tensor by that name, or reads only the slices that hold the rows asked
for.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import stored_pieces
from tfrs_embed.checkpoint.index import Index, check_lengths
from tfrs_embed.checkpoint.stored_pieces import REMEDY
from tfrs_embed.compat.private_tensorflow import context

#: Bytes of a slice, unless one row has more.
BLOCK_BYTES = 16 << 20
#: Bytes that TensorFlow writes at a time, and so the memory that writing takes.
PART_BYTES = 64 << 20

# Parts of TensorFlow's messages that only name its operations.
_NOISE = re.compile(r"\{\{.*?\}\} ?| \[Op:\w+\]")


def blocks(shape: Sequence[int], dtype: tf.DType) -> Iterator[tuple[int, int]]:
    """Yields the first row and the size of each block of a tensor's rows."""
    rows, *rest = shape
    row = math.prod(rest) * dtype.size
    # Rows without values are one block, however many there are.
    size = max(1, BLOCK_BYTES // row if row else rows)
    for start in range(0, rows, size):
        yield start, min(size, rows - start)


class TensorSlice(NamedTuple):
    """A tensor to save, or rows of it.

    Attributes:
        name: the whole tensor's name in the checkpoint.
        value: the tensor, or the rows.
        shape: the whole tensor's shape; None: `value` is the whole.
        start: the number of the first row in the whole tensor.
        column: the first column, if the rows have some of the columns.
    """

    name: str
    value: Any
    shape: Sequence[int] | None = None
    start: int = 0
    column: int | None = None


def in_slices(
    name: str,
    shape: Sequence[int],
    read: Callable[[int, int], tf.Tensor],
    start: int = 0,
    total: int | None = None,
) -> Iterator[TensorSlice]:
    """Yields rows in blocks.

    Args:
        name: the whole tensor's name.
        shape: the rows' shape, [n, ...].
        read: returns rows by the number of the first one, below n, and how
            many there are.
        start: the number of the first row in the whole tensor.
        total: how many rows the whole tensor has; None: n.
    """
    count, *row = shape
    total = count if total is None else total
    if total == 0:
        yield TensorSlice(name, read(0, 0))
    for first, size in blocks(shape, tf.float32):
        yield TensorSlice(name, read(first, size), [total, *row], start + first)


class BundleWriter:
    """Writes a checkpoint's tensors as parts, whose paths begin with `prefix`.

    The host that holds a tensor writes it.

    After a failed write, `add` does nothing and `finish` raises the error: the
    caller goes on reading rows, for which other workers wait. `progress` is
    called with numbers of bytes that were written.
    """

    def __init__(
        self, prefix: str, progress: Callable[[int], None] | None = None
    ) -> None:
        self._prefix = prefix
        self._progress = progress
        # Names, slices and tensors.
        self._pending: list[tuple[str, str, tf.Tensor]] = []
        self._bytes = 0
        self._parts: list[str] = []
        self._error: tf.errors.OpError | None = None
        self._hosts: set[str] = set()  # Those that wrote.

    def add(
        self,
        name: str,
        value: Any,
        shape: Sequence[int] | None = None,
        start: int = 0,
        column: int | None = None,
    ) -> None:
        """Adds the `TensorSlice` of these attributes."""
        if self._error is not None:
            return
        with tf.device("CPU:0"):
            value = tf.convert_to_tensor(value)
        spec = ""
        if shape is not None:
            spec = slice_spec(shape, start, value.shape[0])
        if column is not None:
            spec = f"{spec.rpartition(':')[0]}:{column},{value.shape[1]}"
        self._pending.append((name, spec, value))
        self._bytes += value.shape.num_elements() * value.dtype.size
        if self._bytes >= PART_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes the tensors that were added."""
        if not self._pending:
            return
        of_hosts: dict[str, list[tuple[str, str, tf.Tensor]]] = {}
        for each in self._pending:
            of_hosts.setdefault(cpu_of_host(each[2].device), []).append(each)
        self._hosts.update(of_hosts)
        for host, pending in of_hosts.items():
            names, slices, tensors = zip(*pending, strict=True)
            part = f"{self._prefix}-{len(self._parts)}"
            try:
                with tf.device(host):
                    tf.raw_ops.SaveV2(
                        prefix=part,
                        tensor_names=names,
                        shape_and_slices=slices,
                        tensors=tensors,
                    )
            except tf.errors.OpError as error:
                self.fail(unwritten(part, error))
            self._parts.append(part)
        if self._progress is not None and self._error is None:
            self._progress(self._bytes)
        self._pending, self._bytes = [], 0

    def fail(self, error: tf.errors.OpError) -> None:
        """Makes `finish` raise an error, unless it has an earlier one."""
        self._error = self._error or error

    def finish(self) -> list[str]:
        """Writes what is left; returns the parts' prefixes, or raises."""
        self.flush()
        if self._error is not None:
            raise self._error
        with tf.device("CPU:0"):
            here = cpu_of_host(tf.zeros([]).device)
        if self._hosts - {here}:
            wait_for_hosts()
        return self._parts


class BundleReader:
    """Reads tensors of the checkpoint `prefix`: whole, or some rows.

    Errors of damaged files name the checkpoint, the tensor and the file.

    Attributes:
        shapes: the tensors' shapes by name.
        dtypes: the tensors' dtypes by name.
        pieces: the tensors' slices in data files by name.
        rates: learning rates of tables by optimizer, for `SavedRate`.
        progress: called with numbers of bytes that were read.

    Raises:
        tf.errors.OpError: there is no checkpoint, its index is damaged, or a
            data file is missing or cut off.
    """

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        index = Index(prefix)
        self.shapes, self.dtypes = index.shapes, index.dtypes
        self.pieces = index.pieces
        self.rates: dict[Any, dict[str, float]] = {}
        self.progress: Callable[[int], None] | None = None

    def read(self, name: str) -> tf.Tensor:
        """Returns a whole tensor."""
        if name not in self.pieces:
            return self.read_rows(name, 0, self.shapes[name][0])
        value = self._read(name, "")
        self._count(name, self.shapes[name])
        return value

    def read_rows(self, name: str, start: int, size: int) -> tf.Tensor:
        """Returns `size` rows of a tensor from `start` on."""
        pieces = self.pieces.get(name)
        if not pieces or any(
            p.size > stored_pieces.LARGE_BYTES for p in pieces
        ):
            rows = self.read_array(name, start, size)
            with tf.device("CPU:0"):
                return tf.constant(rows)
        rows = self._read(name, slice_spec(self.shapes[name], start, size))
        self._count(name, rows.shape)
        return rows

    def read_array(self, name: str, start: int, size: int) -> np.ndarray:
        """Does what `read_rows` does, without reading whole large pieces.

        It is slower than TensorFlow, which `read_rows` uses for small pieces.
        """
        shape = self.shapes[name]
        rows = stored_pieces.read_rows(self.pieces[name], shape, start, size)
        self._count(name, rows.shape)
        return rows

    def _read(self, name: str, slice_: str) -> tf.Tensor:
        if not self.dtypes[name].size:
            for piece in self.pieces[name]:
                check_lengths(piece)
        try:
            with tf.device("CPU:0"):
                [value] = tf.raw_ops.RestoreV2(
                    prefix=self.prefix,
                    tensor_names=[name],
                    shape_and_slices=[slice_],
                    dtypes=[self.dtypes[name]],
                )
        except tf.errors.OpError as error:
            raise type(error)(
                None,
                None,
                f"'{name}' can't be read from the checkpoint '{self.prefix}': "
                f"it is in {self.pieces[name][0].file}. {message_of(error)}. "
                f"{REMEDY}",
            ) from error
        return value

    def nbytes(self, name: str) -> int:
        """The size of a tensor in bytes; 0 for strings."""
        return math.prod(self.shapes[name]) * self.dtypes[name].size

    def _count(self, name: str, shape: Sequence[int]) -> None:
        if self.progress is not None:
            self.progress(math.prod(shape) * self.dtypes[name].size)


def wait_for_hosts() -> None:
    """Waits until other hosts have done what they were told to.

    TensorFlow tells them without waiting.

    Raises:
        tf.errors.OpError: it failed on one of them.
    """
    context.async_wait()


def cpu_of_host(device: str) -> str:
    """Returns the name of the CPU of a device's host."""
    spec = tf.DeviceSpec.from_string(device)
    return spec.replace(device_type="CPU", device_index=0).to_string()


def slice_spec(shape: Sequence[int], start: int, size: int) -> str:
    """TensorFlow's description of `size` rows, from `start`, of a tensor."""
    dims = " ".join(str(n) for n in shape)
    return ":".join([f"{dims} {start},{size}"] + ["-"] * (len(shape) - 1))


def message_of(error: tf.errors.OpError) -> str:
    """An error's message, without the names of TensorFlow's operations."""
    return _NOISE.sub("", error.message)


def unwritten(path: str, error: tf.errors.OpError) -> tf.errors.OpError:
    """Returns an error that says which path can't be written, and why."""
    message = f"'{path}' can't be written: {message_of(error)}"
    return type(error)(None, None, message)


def merge(parts: Sequence[str], prefix: str) -> None:
    """Makes one checkpoint of parts, and removes them; reads no tensors."""
    tf.raw_ops.MergeV2Checkpoints(
        checkpoint_prefixes=list(parts),
        destination_prefix=prefix,
        delete_old_dirs=True,
    )


def move(prefix: str, path: str) -> None:
    """Moves a checkpoint to `path`; its index, which completes it, comes last.

    A file or link that is there is replaced.
    """
    folder, name = os.path.split(prefix)
    for file in sorted(tf.io.gfile.listdir(folder)):
        # ".data-..." before ".index".
        if file.startswith(f"{name}."):
            to = path + file.removeprefix(name)
            tf.io.gfile.rename(f"{folder}/{file}", to, overwrite=True)
