"""Writes any checkpoint's tables as this package's checkpoints."""

from __future__ import annotations

import dataclasses
import functools
import os
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import bundle
from tfrs_embed.checkpoint.bundle import BundleReader, TensorSlice
from tfrs_embed.checkpoint.names import from_key
from tfrs_embed.checkpoint.rate import LEARNING_RATE
from tfrs_embed.checkpoint.rows import SCALE, CheckpointValue, Save
from tfrs_embed.compat.files import temporary_folder
from tfrs_embed.compat.private_tensorflow import Trackable
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.command_line import InputError
from tfrs_embed.tools.conversion.contents import Column, Contents, Table


def rename_tables(
    contents: Contents, tables: Mapping[str, str], by_id: bool = False
) -> None:
    """Gives tables new names, by their old names or paths.

    A table without a name goes by its layer's path, and becomes a table of the
    layer's owner. With `by_id` tables of the keys 0, 1, 2 ... become tables of
    ids, with their layers' names.
    """
    if by_id:
        if all(table.keys is None for table in contents.tables):
            raise InputError(f"'{contents.path}' has no tables of keys.")
        contents.notes += [
            f"Not taken over: {', '.join(table.counters)} of '{table.path}', "
            "which tables of ids don't have."
            for table in contents.tables
            if table.counters
        ]
        contents.tables = [_by_id(table) for table in contents.tables]
    known = {table.name or table.layer for table in contents.tables}
    known |= {t.path for t in contents.tables if t.path in tables}
    _check_known("table", tables, known)
    for i, table in enumerate(contents.tables):
        new = tables.get(table.path, tables.get(table.name or table.layer))
        if new is None:
            continue
        layer = table.layer
        if not table.name:
            layer = layer.rpartition("/")[0]
            if table.layer in contents.steps:
                contents.steps.setdefault(layer, contents.steps[table.layer])
        contents.tables[i] = dataclasses.replace(
            table, layer=layer, name=new, of_keras=False
        )


def _by_id(table: Table) -> Table:
    if table.keys is None:
        return table
    keys = table.keys.read(0, table.shape[0])
    if not np.array_equal(keys, np.arange(len(keys))):
        raise InputError(
            f"The keys of '{table.path}' are not the ids 0 to {len(keys) - 1} "
            f"in their order: the first is {keys[0]}, the last {keys[-1]}."
        )
    layer, _, name = table.layer.rpartition("/")
    return dataclasses.replace(table, layer=layer, name=name, parts={})


def rename_layers(contents: Contents, layers: Mapping[str, str]) -> None:
    """Gives layers new paths, by their old ones."""
    _check_known("layer", layers, {table.layer for table in contents.tables})
    renamed: dict[tuple[str, str], Table] = {}
    steps = {}
    for table in contents.tables:
        layer = layers.get(table.layer, table.layer)
        new = dataclasses.replace(table, layer=layer)
        if (layer, new.name) in renamed:
            raise InputError(f"Two tables would become '{new.path}'.")
        renamed[layer, new.name] = new
        # Keras's Embedding has no step.
        if table.layer in contents.steps and not table.of_keras:
            steps[layer] = contents.steps[table.layer]
    contents.tables, contents.steps = list(renamed.values()), steps


def _check_known(what: str, names: Mapping[str, str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            raise InputError(
                f"There is no {what} '{name}', but {sorted(known)}."
            )


def set_steps(contents: Contents, step: int | None) -> None:
    """Sets the steps of the layers whose step is not known to `step`.

    If that is None, it is 0, with a note.
    """
    layers = {table.layer for table in contents.tables if not table.of_keras}
    unknown = sorted(layers - contents.steps.keys())
    if step is not None and not unknown:
        raise InputError(
            f"'{contents.path}' has the layers' steps: {contents.steps}."
        )
    if step is None:
        contents.notes += [
            f"The step of '{layer}' is not known, and set to 0. Optimizers use "
            "it to correct a bias, and for schedules: --step sets it."
            for layer in unknown
        ]
    contents.steps |= dict.fromkeys(unknown, step or 0)


def fit(contents: Contents) -> None:
    """Gives columns dtypes that checkpoints have, and checks their shapes.

    Rows of int8 or int4 and their factors become rows of float32.
    """
    for i, table in enumerate(contents.tables):
        columns = {}
        for name, column in table.columns.items():
            if name == SCALE:
                continue
            integers = column.dtype in (tf.int8, tf.dtypes.experimental.int4)
            dtype = tf.float32 if integers else column.dtype
            columns[name] = column.as_dtype(dtype)
        contents.tables[i] = dataclasses.replace(table, columns=columns)
        contents.tables[i].check_shapes()


def write_checkpoint(
    contents: Contents, path: str, progress: Callable[[int], None]
) -> list[str]:
    """Writes tables as a checkpoint that this package's layers restore.

    Returns what such a checkpoint can't have, in words. `progress` is called
    with numbers of bytes that were read.
    """
    for table in contents.tables:
        if not table.shape[1]:
            raise InputError(
                f"'{table.path}' has no rows, so their width is not known: "
                "remove its files."
            )
    root, left = Trackable(), []
    for table in contents.tables:
        place = _parts(table.layer)
        if table.of_keras:
            variable = _plain(table.columns[PARAMETERS], progress)
            _track(root, [*place, "embeddings"], variable)
            left += [
                f"{slot} of '{table.path}', which a table with a name of its "
                f"own has: --table {table.path}=NAME"
                for slot in table.columns
                if slot != PARAMETERS
            ]
            continue
        place += ["tables", table.name] if table.name else ["table"]
        for name, column in {**table.parts, **table.columns}.items():
            write = functools.partial(_slices_of_column, column, progress)
            _track(root, [*place, name], _Written(write))
        if table.learning_rate is not None:
            write = functools.partial(_slices_of_rate, table.learning_rate)
            _track(root, [*place, LEARNING_RATE], _Written(write))
    for layer, step in contents.steps.items():
        _track(root, [*_parts(layer), "step"], _counter(step))
    # `tf.train.Checkpoint.restore` looks for it.
    _track(root, ["save_counter"], _counter(0))
    with temporary_folder(_beside(path)) as folder:
        whole = tf.train.Checkpoint(root).write(os.path.join(folder, "all"))
        bundle.move(whole, path)
    return left


def _beside(path: str) -> str:
    """Returns a path that nobody uses, on the file system of another path."""
    parent, name = os.path.split(path.rstrip("/"))
    return os.path.join(parent, f".{name}-{uuid.uuid4().hex}")


def _parts(layer: str) -> list[str]:
    """The names of the objects on a layer's path."""
    return [from_key(part) for part in layer.split("/")] if layer else []


def _track(owner: Any, path: Sequence[str], value: Any) -> None:
    """Makes a value a child of an object, with the objects between them."""
    *owners, last = path
    for name in owners:
        child = owner._trackable_children().get(name)
        if child is None:
            child = Trackable()
            owner._track_trackable(child, name)
        owner = child
    owner._track_trackable(value, last)


def _counter(value: int) -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(value, dtype=tf.int64, trainable=False)


def _plain(column: Column, progress: Callable[[int], None]) -> tf.Variable:
    """A Keras layer's variable, which is restored into a plain one."""
    with tf.device("CPU:0"):
        variable = tf.Variable(tf.zeros(column.shape, column.dtype))
        for start, rows in column.blocks(progress):
            values = tf.cast(rows, column.dtype)
            variable[start : start + len(rows)].assign(values)
    return variable


class _Written(Trackable, CheckpointValue):
    """An object whose value a function returns in slices, given its key."""

    def __init__(
        self, slices_of: Callable[[str], Iterable[TensorSlice]]
    ) -> None:
        self._slices_of = slices_of

    def slices(self, key: str, save: Save) -> Iterable[TensorSlice]:
        return self._slices_of(key)

    def check(self, key: str, reader: BundleReader) -> None:
        raise NotImplementedError

    def restore(self, key: str, reader: BundleReader) -> None:
        raise NotImplementedError


def _slices_of_column(
    column: Column, progress: Callable[[int], None], key: str
) -> Iterator[TensorSlice]:
    if not column.shape[0]:
        with tf.device("CPU:0"):
            none = tf.zeros(column.shape, column.dtype)
        yield TensorSlice(key, none)
    for start, rows in column.blocks(progress):
        with tf.device("CPU:0"):
            values = tf.cast(rows, column.dtype)
        yield TensorSlice(key, values, column.shape, start)


def _slices_of_rate(rate: float, key: str) -> Iterator[TensorSlice]:
    yield TensorSlice(key, rate)
