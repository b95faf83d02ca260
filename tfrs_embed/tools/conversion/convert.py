"""The conversion of any checkpoint's tables to this package's, or SOK's."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import bundle, saver
from tfrs_embed.checkpoint.bundle import BundleReader, blocks
from tfrs_embed.checkpoint.rate import LEARNING_RATE
from tfrs_embed.checkpoint.rows import SCALE, Saved
from tfrs_embed.checkpoint.session import Session
from tfrs_embed.compat.private_tensorflow import Trackable
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.command_line import InputError
from tfrs_embed.tools.conversion import paths, sok
from tfrs_embed.tools.conversion.contents import (
    Column,
    Contents,
    Table,
    check_shapes,
)
from tfrs_embed.tools.conversion.objects import unescape

#: Formats that can be written: this package's checkpoints, or files as
#: `sok.dump` or `sok.Saver` writes them.
TARGETS = ("checkpoint", "sok", "sok-saver")


def rename_tables(
    contents: Contents, tables: Mapping[str, str], by_id: bool = False
) -> Contents:
    """Gives tables other names.

    Args:
        contents: what a checkpoint holds.
        tables: the tables' new names by their old ones, or by their paths. A
            table without a name, which is all that its layer has, is known by
            the layer's path; it becomes a table of the object that has the
            layer.
        by_id: whether tables of keys become tables of ids, named as their
            layers were.

    Returns:
        The same under the new names.

    Raises:
        ValueError: there is no such table, or keys are no ids.
    """
    found, notes = list(contents.tables), list(contents.notes)
    if by_id:
        if all(table.keys is None for table in found):
            raise InputError(f"'{contents.path}' has no tables of keys.")
        notes += [
            f"Not taken over: {', '.join(table.counters)} of '{table.path}', "
            "which tables of ids don't have."
            for table in found
            if table.counters
        ]
        found = [_by_id(table) for table in found]
    known = {table.name or table.layer for table in found}
    known |= {table.path for table in found if table.path in tables}
    _check_known("table", tables, known)
    steps = dict(contents.steps)
    for i, table in enumerate(found):
        new = tables.get(table.path, tables.get(table.name or table.layer))
        if new is None:
            continue
        layer = table.layer
        if not table.name:
            layer = layer.rpartition("/")[0]
            if table.layer in contents.steps:
                steps.setdefault(layer, contents.steps[table.layer])
        found[i] = dataclasses.replace(
            table, layer=layer, name=new, of_keras=False
        )
    return dataclasses.replace(
        contents, tables=tuple(found), steps=steps, notes=tuple(notes)
    )


def for_training(contents: Contents) -> Contents:
    """Makes tables of an exported model such that layers train.

    Args:
        contents: what a checkpoint, or an exported model, holds.

    Returns:
        The same without factors of int8 rows, which become float32.
    """
    tables = []
    for table in contents.tables:
        columns = dict(table.columns)
        if columns.pop(SCALE, None) is not None:
            rows = columns[PARAMETERS]
            columns[PARAMETERS] = dataclasses.replace(rows, dtype=tf.float32)
        tables.append(dataclasses.replace(table, columns=columns))
    return dataclasses.replace(contents, tables=tuple(tables))


def rename_layers(contents: Contents, layers: Mapping[str, str]) -> Contents:
    """Gives layers other paths, and checks that their tables can be written.

    Args:
        contents: what a checkpoint holds.
        layers: the layers' new paths by their old ones.

    Returns:
        The same under the new paths.

    Raises:
        ValueError: there is no such layer, two tables get one name, or a
            table's parts don't fit together.
    """
    known = {table.layer for table in contents.tables}
    _check_known("layer", layers, known)
    renamed: dict[tuple[str, str], Table] = {}
    for table in contents.tables:
        new = dataclasses.replace(
            table, layer=layers.get(table.layer, table.layer)
        )
        place = new.layer, new.name
        if place in renamed:
            raise InputError(f"Two tables would become '{new.path}'.")
        check_shapes(new)
        renamed[place] = new
    # Keras's Embedding has none.
    steps = {
        layers.get(table.layer, table.layer): contents.steps[table.layer]
        for table in contents.tables
        if table.layer in contents.steps and not table.of_keras
    }
    return dataclasses.replace(
        contents, tables=tuple(renamed.values()), steps=steps
    )


def _check_known(what: str, names: Mapping[str, str], known: set[str]) -> None:
    for name in names:
        if name not in known:
            raise InputError(
                f"There is no {what} '{name}', but {sorted(known)}."
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
    return dataclasses.replace(
        table, layer=layer, name=name, keys=None, counters={}
    )


def with_steps(contents: Contents, step: int | None) -> Contents:
    """Gives the layers a step whose step is not known.

    Args:
        contents: what a checkpoint holds.
        step: the number of updates made; None: 0, with a note.

    Returns:
        The same with a step for each layer.

    Raises:
        InputError: a step was given, but all layers' are known.
    """
    layers = {table.layer for table in contents.tables if not table.of_keras}
    unknown = layers - contents.steps.keys()
    if step is not None and not unknown:
        raise InputError(
            f"'{contents.path}' has the layers' steps: {dict(contents.steps)}."
        )
    notes = [
        f"The step of '{layer}' is not known, and taken to be 0: its optimizer "
        "may ask for it, to correct a bias or for a schedule."
        for layer in (sorted(unknown) if step is None else ())
    ]
    return dataclasses.replace(
        contents,
        steps={**contents.steps, **dict.fromkeys(unknown, step or 0)},
        notes=(*contents.notes, *notes),
    )


def as_float32(contents: Contents) -> Contents:
    """Makes all values float32, for files that have no other dtype.

    Args:
        contents: what a checkpoint holds.

    Returns:
        The same in float32, with a note for each value that was not.
    """
    tables, notes = [], list(contents.notes)
    for table in contents.tables:
        columns = {}
        for name, column in table.columns.items():
            if column.dtype != tf.float32:
                notes.append(
                    f"The {name} of '{table.path}' are {column.dtype.name}, "
                    "written as float32."
                )
            columns[name] = dataclasses.replace(column, dtype=tf.float32)
        tables.append(dataclasses.replace(table, columns=columns))
    return dataclasses.replace(
        contents, tables=tuple(tables), notes=tuple(notes)
    )


def write_checkpoint(
    contents: Contents, path: str, progress: Callable[[int], None]
) -> list[str]:
    """Writes tables as a checkpoint that this package's layers restore.

    Args:
        contents: the tables.
        path: the checkpoint to write; there must be none.
        progress: called with numbers of bytes that were read.

    Returns:
        What such a checkpoint can't have.

    Raises:
        ValueError: there is a checkpoint already, or a table's width is not
            known.
    """
    paths.check_new_checkpoint(path)
    for table in contents.tables:
        if not table.shape[1]:
            raise InputError(
                f"'{table.path}' has no rows, which would tell how wide they "
                "are: say --dim."
            )
    root, left = _Node(), []
    for table in contents.tables:
        place = _parts(table.layer)
        if table.of_keras:
            variable = _plain(table.columns[PARAMETERS], progress)
            root.add((*place, "embeddings"), variable)
            left += [
                f"{slot} of '{table.path}', which a table with a name of its "
                f"own has: --table {table.path}=NAME"
                for slot in table.columns
                if slot != PARAMETERS
            ]
            continue
        place += ["tables", table.name] if table.name else ["table"]
        for name, column in {**table.parts, **table.columns}.items():
            rows = _Rows(f"{table.path}/{name}", column, progress)
            root.add((*place, name), _leaf(rows))
        if table.learning_rate is not None:
            rate = _Rate(f"{table.path}/{LEARNING_RATE}", table.learning_rate)
            root.add((*place, LEARNING_RATE), _leaf(rate))
    for layer, step in contents.steps.items():
        root.add((*_parts(layer), "step"), _counter(step))
    # `tf.train.Checkpoint.restore` looks for it.
    root.add(("save_counter",), _counter(0))
    with _temporary_beside(path) as folder:
        whole = tf.train.Checkpoint(root).write(os.path.join(folder, "all"))
        bundle.merge([whole], path)
    return left


def write_sok(
    contents: Contents,
    path: str,
    as_saver: bool,
    progress: Callable[[int], None],
) -> list[str]:
    """Writes tables as a folder of SOK's files.

    Args:
        contents: the tables.
        path: the folder to write; there must be nothing.
        as_saver: whether as `sok.Saver` does, or else as `sok.dump`.
        progress: called with numbers of bytes that were read.

    Returns:
        What such files can't have.

    Raises:
        InputError: there is something already.
    """
    check_new_folder(path)
    left = [f"the step of '{layer}'" for layer in contents.steps]
    with _temporary_beside(path) as folder:
        files = os.path.join(folder, "files")
        os.mkdir(files)
        for table in contents.tables:
            before = set(os.listdir(files))
            missing = sok.write(files, table, as_saver, progress)
            left += [f"{name} of '{table.path}'" for name in missing]
            columns = table.columns.keys() - set(missing)
            if len(os.listdir(files)) - len(before) != len(columns) + 1:
                raise InputError(
                    f"'{table.path}' and another table would have files of one "
                    "name."
                )
        os.rename(files, path)
    return left


def check_new_folder(path: str) -> None:
    """Checks that a folder of SOK's files can be written to a path.

    Raises:
        InputError: there is something already, or it is not local.
    """
    paths.check_local(path)
    if os.path.exists(path):
        raise InputError(f"There is '{path}' already.")


@contextlib.contextmanager
def _temporary_beside(path: str) -> Iterator[str]:
    """A folder on the file system of a path, which is gone afterwards."""
    parent, name = os.path.split(path.rstrip("/"))
    folder = os.path.join(parent, f".{name}-{uuid.uuid4().hex}")
    tf.io.gfile.makedirs(folder)
    try:
        yield folder
    finally:
        with contextlib.suppress(tf.errors.OpError):
            tf.io.gfile.rmtree(folder)


def _parts(layer: str) -> list[str]:
    return [unescape(part) for part in layer.split("/")] if layer else []


class _Node(Trackable):
    """An object that has others, as a layer has tables."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}

    def add(self, path: Sequence[str], leaf: Any) -> None:
        """Puts an object below this one."""
        first, *rest = path
        if not rest:
            self._track_trackable(leaf, first)
            return
        if first not in self._nodes:
            self._nodes[first] = _Node()
            self._track_trackable(self._nodes[first], first)
        self._nodes[first].add(rest, leaf)


def _counter(value: int) -> tf.Variable:
    with tf.device("CPU:0"):
        return tf.Variable(value, dtype=tf.int64, trainable=False)


def _plain(column: Column, progress: Callable[[int], None]) -> tf.Variable:
    """A Keras layer's variable, which is restored as any other is."""
    with tf.device("CPU:0"):
        variable = tf.Variable(tf.zeros(column.shape, column.dtype))
        for start, size in blocks(column.shape, column.dtype):
            rows = tf.cast(column.read(start, size), column.dtype)
            variable[start : start + size].assign(rows)
            progress(column.nbytes_of(size))
    return variable


def _leaf(saved: Saved) -> Trackable:
    leaf = Trackable()
    saver.mark(leaf, saved)
    return leaf


class _Imported(Saved):
    """A value that is only ever saved."""

    def check(self, key: str, reader: BundleReader) -> None:
        raise NotImplementedError

    def restore(self, key: str, reader: BundleReader) -> None:
        raise NotImplementedError


class _Rows(_Imported):
    def __init__(
        self, name: str, column: Column, progress: Callable[[int], None]
    ) -> None:
        self.name = name
        self._column = column
        self._progress = progress

    def save(self, key: str, session: Session) -> None:
        column = self._column
        _save(key, session, column.shape, column.dtype, self._read)

    def _read(self, start: int, size: int) -> np.ndarray:
        rows = self._column.read(start, size)
        self._progress(self._column.nbytes_of(size))
        return rows


class _Rate(_Imported):
    def __init__(self, name: str, rate: float) -> None:
        self.name = name
        self._rate = rate

    def save(self, key: str, session: Session) -> None:
        session.writer().add(key, self._rate)


def _save(
    key: str,
    session: Session,
    shape: Sequence[int],
    dtype: tf.DType,
    read: Callable[[int, int], np.ndarray],
) -> None:
    writer = session.writer()
    with tf.device("CPU:0"):
        if not shape[0]:
            writer.add(key, tf.zeros(shape, dtype))
        for start, size in blocks(shape, dtype):
            rows = tf.cast(read(start, size), dtype)
            writer.add_rows(key, shape, start, rows)
