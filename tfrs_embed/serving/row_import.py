"""Imports tables' rows from Parquet files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import bundle
from tfrs_embed.checkpoint.rows import KEYS, LAST_TIME, LAST_USED
from tfrs_embed.compat.arguments import flag
from tfrs_embed.compat.arrow import import_pyarrow, reading_parquet
from tfrs_embed.distribution.failures import raised_on_all_workers
from tfrs_embed.ops.checks import Checks
from tfrs_embed.ops.key_inputs import as_int64
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.serving.row_files import (
    FINGERPRINT,
    KEY,
    ROW,
    counters_of,
    tables_of,
)
from tfrs_embed.serving.workers import strategy_of
from tfrs_embed.storage.dynamic_table import remove_keys
from tfrs_embed.storage.table_keys import require_past
from tfrs_embed.storage.table_state import TableState

#: A file may unpack to so many bytes, or to so many times its size.
_UNPACKED_BYTES = 64 << 20
_UNPACKED_RATIO = 20
#: How the names of files of removed keys begin.
_REMOVED = "_removed-"


def import_rows(
    target: Any,
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    slots: bool = False,
    counters: bool = False,
) -> None:
    """Sets rows of tables to those of Parquet files, by key.

    The rows of a model come from a folder that `export_rows` has made; those
    of one table, `layer.tables[name]`, from any files with the columns

    - key: integers, the numbers of rows; of a table with `DynamicKeys` the
      keys. Of string keys their text, or int64, their fingerprints
      (`tf.fingerprint`). int64 are also the bits of uint64 keys. Texts may be
      null if there is a column
    - fingerprint: int64, the fingerprints of all texts.
    - row: lists of `dim` floating numbers.
    - with `slots`, one for each slot of the optimizer, by its name, as
      `export_rows` writes them.
    - with `counters`, those of a table with `DynamicKeys`, as `export_rows`
      writes them: the table then evicts as the exported one would. Steps of
      last use are those of the exporter: the layer's step must not be before
      them, so assign it first (`layer.step.assign`).

    Other columns, and files whose names begin with "_" or ".", are not read,
    except `_removed-*.parquet` of a folder: keys that lose their rows. Rows
    without a key in the files, and without `slots` all slots, stay. Keys that
    have no row get one, as `assign` gives it, with initial slots, and without
    `counters` counted once, and last used now. A first export and all later
    ones, imported in their order, make the rows that the exporter has.

    The files are read two times: everything is checked before the first row
    changes. Rows are read in blocks of about 16 MiB, beside which 8 bytes for
    each key are in memory, or 24 with `counters`. Call it eagerly, between
    steps. With several workers all of them call it, with files that all can
    see.

    Example:
        >>> import pyarrow as pa
        >>> import pyarrow.parquet as pq
        >>> rows = {"key": [7, 3], "row": [[1.0, 2.0], [3.0, 4.0]]}
        >>> pq.write_table(pa.table(rows), "movies.parquet")
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 2)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
        ... )
        >>> layer.build(None)
        >>> tfrs_embed.serving.import_rows(
        ...     layer.tables["movie"], "movies.parquet"
        ... )
        >>> layer(tf.constant([3])).numpy().tolist()
        [[3.0, 4.0]]

    Args:
        target: a Keras model or a layer, whose tables are built; or one of a
            layer's tables.
        source: a model's folder; a table's folder, its file, or a list of its
            files. On a file system of `tf.io.gfile`.
        slots: whether to set the optimizer's slots too.
        counters: whether to set what eviction rules know of keys, too.

    Raises:
        ImportError: pyarrow is not installed.
        TypeError: an argument has a wrong type.
        ValueError: there are no files, or they are of other layers or tables;
            a file can't be read, lacks a column or has it in another type,
            with nulls, or with rows of another length; a number is not finite
            in the table's dtype; a key is outside of the table, or there
            twice; a frequency is negative; a key was used after the layer's
            step, or more than a day after now; there is no room for new keys;
            or a feature's hashing makes rows of the ids of the one table. Then
            nothing has changed.
        RuntimeError: it is called in a traced function, or it failed on another
            worker.
    """
    flag(slots, "import_rows: slots")
    flag(counters, "import_rows: counters")
    if not tf.executing_eagerly():
        raise RuntimeError("import_rows: import rows between steps, eagerly.")
    is_table = isinstance(target, TableState)
    strategy = strategy_of(target.layer() if is_table else target)
    with raised_on_all_workers(strategy, "The import"):
        arrow = import_pyarrow("import_rows")
        found = _one_table(target, source) if is_table else None
        imports = [
            _Import(arrow, state, files, slots, counters)
            for state, files in found or _all_tables(target, source)
        ]
        for each in imports:
            each.check()
    # The workers compare keys, which one of them can't leave alone.
    with raised_on_all_workers(strategy, "The import"):
        for each in imports:
            each.check_room()
        for each in imports:
            each.give_rows()
    with raised_on_all_workers(strategy, "The import"):
        for each in imports:
            each.write()


def _one_table(
    state: TableState, source: Any
) -> list[tuple[TableState, list[str]]]:
    where = f"Table '{state.spec.name}'"
    if PARAMETERS not in state.variables:
        raise ValueError(
            f"{where} isn't made yet: call or build its layer first."
        )
    if state.hashed_by is not None:
        raise ValueError(
            f"{where}: {state.hashed_by} has hashing, which makes rows of its "
            "ids: import what export_rows wrote, by import_rows(layer, folder)."
        )
    if isinstance(source, (str, os.PathLike)):
        path = os.fspath(source)
        files = _files_in(path) if tf.io.gfile.isdir(path) else [path]
    else:
        files = [os.fspath(path) for path in source]
        if not files:
            raise ValueError(f"{where}: source is an empty list.")
    return [(state, files)]


def _all_tables(
    model: Any, folder: Any
) -> Iterator[tuple[TableState, list[str]]]:
    """Finds the files of a model's tables in a folder of `export_rows`."""
    if not isinstance(folder, (str, os.PathLike)):
        raise TypeError(
            "import_rows: the rows of a model are in one folder, got "
            f"{type(folder).__name__}."
        )
    folder, tables = os.fspath(folder).rstrip("/"), tables_of(model)
    names = [
        f"{layer}/{table}"
        for layer in _names_in(folder)
        for table in _names_in(f"{folder}/{layer}")
    ]
    unknown = [name for name in names if name not in tables]
    if unknown:
        raise ValueError(
            f"'{folder}' has rows of '{unknown[0]}', and the model has the "
            f"tables {[*tables]}. Import a table of another name by "
            "import_rows(layer.tables[name], folder)."
        )
    if not names:
        raise ValueError(f"'{folder}' has no rows that export_rows wrote.")
    for name in names:
        yield tables[name].state, _files_in(f"{folder}/{name}")


def _names_in(folder: str) -> list[str]:
    """Returns what is in a folder, except hidden files and markers."""
    if not tf.io.gfile.isdir(folder):
        raise ValueError(f"'{folder}' is no folder.")
    names = sorted(name.rstrip("/") for name in tf.io.gfile.listdir(folder))
    return [n for n in names if n[0] not in "_." or n.startswith(_REMOVED)]


def _files_in(folder: str) -> list[str]:
    names = [name for name in _names_in(folder) if name.endswith(".parquet")]
    if not names:
        raise ValueError(f"'{folder}' has no Parquet files of rows.")
    return [f"{folder}/{name}" for name in names]


class _Import:
    """An import of files into a table.

    Attributes:
        keys: the keys or numbers of all rows, [n] int64.
        removed: the keys that lose their rows, [n] int64.
    """

    def __init__(
        self,
        arrow: Any,
        state: TableState,
        files: list[str],
        slots: bool,
        counters: bool,
    ) -> None:
        self._arrow, self._state = arrow, state
        names = {path: path.rpartition("/")[2] for path in files}
        self._removing = [p for p in files if names[p].startswith(_REMOVED)]
        self._files = [p for p in files if not names[p].startswith(_REMOVED)]
        self._counters = counters_of(state) if counters else []
        parts = [*(self._state.slots if slots else ()), *self._counters]
        self._columns = {
            ROW: PARAMETERS,
            **dict(zip(parts, parts, strict=True)),
        }
        self._where = f"table '{self._state.spec.name}'"
        self._is_writing = False
        self._keyed = KEYS in self._state.variables
        self.keys = self.removed = np.zeros([0], np.int64)

    def check(self) -> None:
        """Reads and checks all files; takes their keys."""
        if self._removing and not self._keyed:
            raise ValueError(
                f"'{self._removing[0]}': {self._where} has no DynamicKeys, "
                "and can't remove rows."
            )
        for path in self._removing:
            for keys, _ in self._blocks(path, {}):
                self.removed = np.union1d(self.removed, keys)
        found, ends = [self.keys], []
        for path in self._files:
            found += [keys for keys, _ in self._blocks(path, self._columns)]
            ends.append(sum(map(len, found)))
        self.keys = np.concatenate(found)
        order = np.argsort(self.keys, kind="stable")
        again = np.flatnonzero(np.diff(self.keys[order]) == 0)
        if again.size:
            place = order[again[0] + 1]
            path = self._files[np.searchsorted(ends, place, "right")]
            raise ValueError(
                f"'{path}': each key of {self._where} must be there once, got "
                f"{self.keys[place]} again."
            )

    def check_room(self) -> None:
        """Raises a ValueError if a table has no room for all new keys."""
        if self._keyed:
            known = self._state.variables[KEYS].numpy()
            kept = np.setdiff1d(known, self.removed)
            keys = np.union1d(kept, self.keys)
            try:
                self._state.built("import_rows").require_room(keys)
            except ValueError as error:
                raise ValueError(f"'{self._files[0]}': {error}") from error

    def give_rows(self) -> None:
        """Removes keys, and gives rows to new ones."""
        if self._keyed:
            rows = self._state.built("import_rows")
            remove_keys(rows, self.removed)
            rows.add(self.keys)

    def write(self) -> None:
        """Writes rows, slots and counters, and texts of keys."""
        self._is_writing = True
        found: dict[str, list[np.ndarray]] = {n: [] for n in self._counters}
        for path in self._files:
            for keys, parts in self._blocks(path, self._columns):
                for name, values in parts.items():
                    if name in found:
                        found[name].append(values)
                        continue
                    with tf.device("CPU:0"):
                        self._write(name, keys, tf.constant(values))
        # Together: each time all of the table's keys are read and written.
        for name, blocks in found.items():
            if blocks:
                self._write(name, self.keys, np.concatenate(blocks))

    def _write(self, name: str, keys: np.ndarray, values: Any) -> None:
        state = self._state
        if self._keyed:
            state.built("import_rows").write_for(name, keys, values)
        elif name == PARAMETERS:
            state.assign_numbers(keys, values)
        else:
            saved = state.saved[name]
            with saved.writing():
                saved.write_rows(keys, tf.cast(values, saved.dtype))

    def _blocks(
        self, path: str, columns: dict[str, str]
    ) -> Iterator[tuple[np.ndarray, dict[str, np.ndarray]]]:
        """Yields checked keys and parts of a file, in blocks."""
        width = 2 + self._state.spec.dim * len(columns)
        rows = max(1, bundle.BLOCK_BYTES // (4 * width))
        with reading_parquet(self._arrow, path) as file:
            size = tf.io.gfile.stat(path).length
            self._check_file(path, size, file, [KEY, *columns])
            names = [KEY, *columns]
            if self._has_texts(file.schema_arrow):
                names.append(FINGERPRINT)
                self._check_file(path, size, file, names)
            for batch in file.iter_batches(rows, columns=names):
                keys = self._keys_of(path, batch)
                parts = {
                    part: self._values(path, name, batch, keys)
                    for name, part in columns.items()
                }
                yield keys, parts

    def _check_file(
        self, path: str, size: int, file: Any, columns: list[str]
    ) -> None:
        """Checks names and sizes, before anything is allocated."""
        names, metadata = file.schema_arrow.names, file.metadata
        for name in columns:
            if names.count(name) != 1:
                raise ValueError(
                    f"'{path}' must have one column '{name}' for "
                    f"{self._where}, and has {names}."
                )
        groups = map(metadata.row_group, range(metadata.num_row_groups))
        unpacked = sum(group.total_byte_size for group in groups)
        unpacked = max(unpacked, 8 * metadata.num_rows)
        limit = max(_UNPACKED_BYTES, _UNPACKED_RATIO * size)
        if unpacked > limit:
            raise ValueError(
                f"'{path}' for {self._where} has {size:,} bytes, and would "
                f"unpack to {unpacked:,}, more than {limit:,}."
            )

    def _has_texts(self, schema: Any) -> bool:
        """Whether a file has texts of keys, and their fingerprints."""
        keys = self._state.spec.keys
        return (
            keys is not None
            and keys.dtype == tf.string
            and FINGERPRINT in schema.names
            and not self._arrow.types.is_integer(schema.field(KEY).type)
        )

    def _keys_of(self, path: str, batch: Any) -> np.ndarray:
        """Returns a batch's keys, [n] int64; a table may learn their texts."""
        array = batch.column(KEY)
        if FINGERPRINT not in batch.schema.names:
            keys = of_texts = self._keys(path, array)
        else:
            keys = self._keys(path, batch.column(FINGERPRINT))
            of_texts = keys[array.is_valid().to_numpy(False)]
            array = array.drop_null()
            made = self._keys(path, array) if len(array) else of_texts
            if np.any(made != of_texts):
                place = int(np.argmax(made != of_texts))
                raise ValueError(
                    f"'{path}': key {array[place].as_py()!r:.80} of "
                    f"{self._where} has the fingerprint {of_texts[place]}, "
                    "which is another key's."
                )
        texts = self._state.key_texts if self._is_writing else None
        if texts is not None and not self._arrow.types.is_integer(array.type):
            strings = tf.constant(array.to_numpy(False), tf.string)
            texts.learn(of_texts, strings.numpy().tolist())
        return keys

    def _keys(self, path: str, array: Any) -> np.ndarray:
        """Returns keys, or numbers of rows, as [n] int64."""
        declared, given = self._state.spec.keys, array.to_numpy(False)
        dtype = tf.int64 if declared is None else declared.dtype
        is_text = dtype == tf.string and given.dtype.kind == "O"
        if array.null_count or not (is_text or given.dtype.kind in "iu"):
            kinds = "strings, or int64" if dtype == tf.string else "integers"
            raise ValueError(
                f"'{path}': column '{KEY}' for {self._where} must have {kinds} "
                f"and no nulls, and is {array.type} with {array.null_count} "
                "nulls."
            )
        if is_text:
            return as_int64(self._where, dtype, given, Checks()).numpy()
        if dtype == tf.uint64 and given.dtype == np.uint64:
            return given.view(np.int64)
        low, high = tf.int64.min, tf.int64.max
        if declared is None:
            low, high = 0, self._state.spec.vocabulary_size - 1
        elif dtype not in (tf.uint64, tf.string):
            low, high = dtype.min, dtype.max
        outside = given[(given < low) | (given > high)]
        if outside.size:
            raise ValueError(
                f"'{path}': keys of {self._where} must be from {low} to "
                f"{high}, got {outside[0]}."
            )
        return given.astype(np.int64)

    def _values(
        self, path: str, name: str, batch: Any, keys: np.ndarray
    ) -> np.ndarray:
        """Returns a column as float32, [n, dim] or [n]."""
        saved, array = (
            self._state.saved[self._columns[name]],
            batch.column(name),
        )
        where = f"'{path}': column '{name}' for {self._where}"
        if saved.dtype == tf.int64:
            return self._uses(name, array, keys, where)
        shape, flat = [len(keys), *saved.shape[1:]], array
        is_list = len(shape) == 2
        if is_list and self._arrow.types.is_nested(array.type):
            count = self._arrow.compute.list_value_length(array).fill_null(0)
            other = np.flatnonzero(count.to_numpy(False) != shape[1])
            if other.size:
                raise ValueError(
                    f"{where} must have {shape[1]} numbers a row, and has "
                    f"{count[int(other[0])]} at key {keys[other[0]]}."
                )
            flat = array.flatten()
        values = flat.to_numpy(False)
        if values.dtype.kind not in "iuf" or is_list == (flat is array):
            kinds = "lists of numbers" if is_list else "numbers"
            raise ValueError(f"{where} must have {kinds}, and is {array.type}.")
        # Nulls are NaN.
        values = values.reshape(shape).astype(np.float64)
        limit = float(saved.dtype.max)
        bad = np.argwhere(~(np.abs(values) <= limit))
        if bad.size:
            raise ValueError(
                f"{where} must have finite numbers of {saved.dtype.name}, up "
                f"to {limit:.4g}, and has {values[tuple(bad[0])]} at key "
                f"{keys[bad[0][0]]}."
            )
        return values.astype(np.float32)

    def _uses(
        self, name: str, array: Any, keys: np.ndarray, where: str
    ) -> np.ndarray:
        """Returns frequencies, or moments of last use, as [n] int64."""
        values = array.to_numpy(False)
        if array.null_count or values.dtype.kind not in "iu":
            raise ValueError(
                f"{where} must have integers and no nulls, and is {array.type} "
                f"with {array.null_count} nulls."
            )
        wrong, limit, more = values < 0, "at least 0", ""
        if name == LAST_TIME:
            require_past(values, where)
            wrong = np.zeros(len(values), bool)
        elif name == LAST_USED:
            step = int(np.asarray(self._state.built("import_rows").step))
            wrong, limit = values > step, f"at most the layer's step, {step}"
            more = " Assign the exporter's step to layer.step before."
        if wrong.any():
            place = int(np.argmax(wrong))
            raise ValueError(
                f"{where} must be {limit}, and is {values[place]} at key "
                f"{keys[place]}.{more}"
            )
        return values.astype(np.int64)
