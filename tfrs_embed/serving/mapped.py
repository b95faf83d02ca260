"""Values of an exported model's tables in files that are mapped into memory."""

from __future__ import annotations

import os
import re
import uuid
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.kernels import portable_call


class MappedFile(tf.saved_model.experimental.TrackableResource):
    """A file of the SavedModel, and its assignment to a table's variable.

    The file has the numbers row after row, as they are in memory, and nothing
    else. Whatever loads the model calls `_initialize` after it has restored the
    variables, and the checkpoint of an export has the variable without rows.
    Where there are kernels, the variable's memory is the file from then on;
    elsewhere TensorFlow's operations read it. A loaded model that is saved
    again has all rows in its checkpoint, also those of deltas: they stay.

    Args:
        variable: the variable; it may have any number of rows.
        shape: its values' shape.
        path: the path of a file to make: TensorFlow saves it, empty as it is,
            by its own name.

    Attributes:
        file: the file's path in the SavedModel's folder.
    """

    def __init__(
        self, variable: tf.Variable, shape: Sequence[int], path: str
    ) -> None:
        super().__init__()
        self._handle, self._dtype = variable.handle, variable.dtype
        self._shape = tf.TensorShape(shape)
        self.file = f"assets/{os.path.basename(path)}"
        with open(path, "wb"):
            pass
        self._asset = tf.saved_model.Asset(path)
        self._track_trackable(self._asset, "file")

    def _create_resource(self) -> tf.Tensor:
        # A handle of nothing: TensorFlow calls `_initialize` only of objects
        # in a SavedModel that have a handle.
        return tf.raw_ops.VarHandleOp(
            dtype=tf.bool, shape=[], shared_name=f"unused_{uuid.uuid4().hex}"
        )

    def _initialize(self) -> None:
        operations: Any = kernels.operations(None, elsewhere=True)

        def kernel(path: tf.Tensor) -> list[tf.Tensor]:
            rows = operations.tfrs_embed_mapped_rows(
                path=path, T=self._dtype, shape=self._shape
            )
            return [rows]

        def assign() -> tf.Tensor:
            path = self._asset.asset_path
            [rows] = (
                self._read(path)
                if operations is None
                else portable_call.call(self._read, kernel, [path])
            )
            tf.raw_ops.AssignVariableOp(resource=self._handle, value=rows)
            return tf.constant(True)

        there = tf.raw_ops.VariableShape(input=self._handle)[0]
        tf.cond(there > 0, lambda: False, assign)

    def _read(self, path: tf.Tensor) -> list[tf.Tensor]:
        """Does what the kernel does, in memory."""
        shape, dtype = self._shape, self._dtype
        values = tf.io.decode_raw(tf.io.read_file(path), tf.uint8)
        found = tf.size(values, tf.int64)
        wanted = shape.num_elements() * dtype.size
        words = (
            *("The table's file ", path, " has ", tf.strings.as_string(found)),
            f" bytes, not the {wanted} of {dtype.name} {shape}.",
        )
        fits = tf.debugging.Assert(found == wanted, [tf.strings.join(words)])
        number = [dtype.size] if dtype.size > 1 else []
        with tf.control_dependencies([fits]):
            # From a given number of rows TensorFlow would conclude that the
            # file has them, and leave out the check.
            values = tf.reshape(values, [-1, *shape[1:], *number])
        return [tf.bitcast(values, dtype)]


def file_name(number: int, table: str) -> str:
    """How the names of a table's files begin, on file systems of all kinds."""
    table = re.sub(r"[^A-Za-z0-9_.]", "_", table)[:80]
    return f"{number}-{table}"
