"""Writes the values of an exported model's tables in blocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import bundle
from tfrs_embed.checkpoint.names import in_key, key_of
from tfrs_embed.serving.tables import ServedTables


class Blocks:
    """Writes tensors of any size block by block, in the order of rows."""

    def __init__(self, writer: bundle.BundleWriter) -> None:
        self._writer = writer
        self._whole: dict[str, np.ndarray] = {}

    def add(
        self, key: str, shape: Sequence[int], start: int, rows: tf.Tensor
    ) -> None:
        """Adds rows of a tensor of `shape`, from row `start` on."""
        if rows.shape == shape:
            self._writer.add(key, rows)
            return
        end = start + rows.shape[0]
        if rows.dtype in (tf.float16, tf.string):
            # TensorFlow can't put slices of these dtypes together.
            if start == 0:
                dtype = rows.dtype.as_numpy_dtype
                self._whole[key] = np.empty(shape, dtype)
            self._whole[key][start:end] = rows.numpy()
            if end == shape[0]:
                self._writer.add(key, self._whole.pop(key))
        else:
            self._writer.add(key, rows, shape, start)


class Files:
    """Writes tables' files block by block, into a SavedModel's folder.

    Errors are the `writer`'s, which goes on as if there were none.
    """

    def __init__(
        self,
        folder: str,
        writer: bundle.BundleWriter,
        progress: Callable[[int], None],
    ) -> None:
        self._folder = folder
        self._writer = writer
        self._progress = progress
        self._open: dict[str, Any] = {}

    def add(self, name: str, rows: tf.Tensor) -> None:
        """Adds rows to the end of a file."""
        try:
            if name not in self._open:
                path = f"{self._folder}/{name}"
                self._open[name] = tf.io.gfile.GFile(path, "wb")
            self._open[name].write(rows.numpy().tobytes())
        except tf.errors.OpError as error:
            self._writer.fail(error)
        else:
            self._progress(rows.shape.num_elements() * rows.dtype.size)

    def close(self) -> None:
        """Completes the files."""
        for file in self._open.values():
            try:
                file.close()
            except tf.errors.OpError as error:
                self._writer.fail(error)


def save_tables(
    tables: ServedTables,
    folder: str,
    writes: bool,
    progress: Callable[[int], None],
    others: Mapping[str, Any],
) -> None:
    """Adds the tables' values to the variables of a SavedModel.

    Without `writes`, this worker only takes part in reading. `progress` is
    called with numbers of bytes that were written. `others` are values of
    further variables, by key.
    """
    writer = bundle.BundleWriter(f"{folder}/variables/tables", progress)
    blocks = Blocks(writer)
    files = Files(folder, writer, progress)
    for key, value in others.items():
        writer.add(key, value)
    for layer, its_tables in tables.by_layer.items():
        for table in its_tables.values():
            for name, variable in table.variables.items():
                rows, *row = table.shapes[name]
                if rows == 0 or name in table.files:  # There will be no block.
                    empty = tf.zeros([0, *row], variable.dtype)
                    writer.add(_key(layer, table.name, name), empty)
            for start, block in table.blocks():
                # A worker that doesn't write reads for the others.
                for name, rows in block.items() if writes else ():
                    if name in table.files:
                        files.add(table.files[name].file, rows)
                        continue
                    key = _key(layer, table.name, name)
                    blocks.add(key, table.shapes[name], start, rows)
    if not writes:
        return
    files.close()
    parts = writer.finish()
    variables = f"{folder}/variables/variables"
    graph = f"{folder}/variables/graph"
    for file in tf.io.gfile.glob(f"{variables}.*"):
        tf.io.gfile.rename(file, graph + file[len(variables) :])
    bundle.merge([graph, *parts], variables)


def _key(*path: str) -> str:
    """The key of a variable, by its layer, table and name."""
    return key_of("/".join(["tables", *map(in_key, path)]))
