"""The tables of an exported model.

While a model is traced for serving, its layers look ids up in these tables and
not in their engines. The values of these tables are in the exported files
alone.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint import bundle
from tfrs_embed.checkpoint.rows import (
    FALLBACK,
    KEYS,
    SCALE,
    TEXT,
)
from tfrs_embed.compat.private_tensorflow import (
    Trackable,
    UninitializedVariable,
)
from tfrs_embed.distribution import key_shards
from tfrs_embed.ops import backend
from tfrs_embed.ops.backend import SERVED_TABLES
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.lookup import combine
from tfrs_embed.ops.stored_table import StoredTable, stored_width
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.serving import rows as stored_rows
from tfrs_embed.serving.key_filters import KeyFilter, KeyFilters
from tfrs_embed.serving.mapped import MappedFile, file_name
from tfrs_embed.storage.table_state import TableState

#: An updatable table's keys and their rows; see `ServedTable`.
INDEX = "index"
#: The rows of an updatable table of keys that no key has, [f] int64.
FREE = "free"
#: How the name of a variable's mapped file ends among a table's children.
MAPPED = "_file"
#: In an updatable table whose keys share no rows the row of absent keys: zeros.
NO_ROW = 0
#: The end of an index: a key without a row.
NO_KEY = tf.int64.max
#: An index has a multiple of this number of columns: its two rows are aligned,
#: and TensorFlow reads them without a copy.
COLUMNS = 8

#: Returns numbers of rows, or ids, by places, int64 of any shape.
Places = Callable[[tf.Tensor], tf.Tensor]


class ServedTables:
    """The tables of an exported model, with rows of a dtype, or their own.

    `updatable` tables of keys can be given other keys. With `files`, a folder
    for empty files, rows and scales are mapped files. `filters` choose the keys
    of tables.
    """

    def __init__(
        self,
        rows: str | None,
        updatable: bool = False,
        files: str | None = None,
        filters: KeyFilters | None = None,
    ) -> None:
        self._filters = filters or KeyFilters()
        self._rows = rows
        self._updatable = updatable
        self._files = files
        #: The layers of these tables by unique names.
        self.layers: dict[str, Any] = {}
        #: Each layer's tables by their names, by the layers' unique names.
        self.by_layer: dict[str, dict[str, ServedTable]] = {}

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """A context in which layers look ids up in these tables."""
        token = SERVED_TABLES.set(self)
        try:
            yield
        finally:
            SERVED_TABLES.reset(token)

    @tf.autograph.experimental.do_not_convert
    def lookup(
        self,
        layer: Any,
        states: Sequence[TableState],
        bags: Sequence[BaggedIds],
    ) -> list[tf.Tensor]:
        """Looks bags up in a layer's tables, one table for each of the bags.

        Returns:
            Vectors as those of `ops.lookup.lookup`, float32.
        """
        tables = [self._table(layer, state) for state in states]
        found: dict[int, tf.Tensor] = {}
        for i, table in enumerate(tables):
            if table.has_keys:
                rows = table.rows_of_keys(bags[i].ids)
                found[i] = combine(rows, None, bags[i])
        places = [i for i in range(len(tables)) if i not in found]
        different = list(dict.fromkeys(tables[i] for i in places))
        # One operation for all of them, where there are kernels.
        vectors = backend.operations(None, training=False).lookup_stored(
            [table.stored for table in different],
            [different.index(tables[i]) for i in places],
            [bags[i] for i in places],
        )
        found.update(zip(places, vectors, strict=True))
        return [found[i] for i in range(len(tables))]

    def of_state(self, state: TableState) -> ServedTable:
        """Returns the exported table of a table in training.

        Raises a RuntimeError if nothing has kept the table's layer.
        """
        layer = state.layer()
        if layer is None:
            raise RuntimeError(
                f"Table '{state.spec.name}' can't be exported: its layer is "
                "gone. Keep the layer as long as its tables."
            )
        return self._table(layer, state)

    def _table(self, layer: Any, state: TableState) -> ServedTable:
        name = unique_name(layer, self.layers)
        tables, table = self.by_layer.setdefault(name, {}), state.spec.name
        if table not in tables:
            with tf.init_scope():
                number = sum(map(len, self.by_layer.values()))
                tables[table] = ServedTable(
                    state,
                    self._rows,
                    self._updatable,
                    self._files
                    and os.path.join(self._files, file_name(number, table)),
                    self._filters.of_table(name, state),
                )
        return tables[table]

    def require_filtered(self) -> None:
        """Requires that each filter is for one of these tables.

        Raises:
            ValueError: a filter is for another table.
        """
        self._filters.require_tables(
            (layer, table.state)
            for layer, tables in self.by_layer.items()
            for table in tables.values()
        )

    @property
    def nbytes(self) -> int:
        """The size of all tables in bytes."""
        return sum(
            math.prod(table.shapes[name]) * variable.dtype.size
            for table in self
            for name, variable in table.variables.items()
        )

    def __iter__(self) -> Iterator[ServedTable]:
        """The tables, layer after layer."""
        for tables in self.by_layer.values():
            yield from tables.values()


def unique_name(layer: Any, layers: dict[str, Any]) -> str:
    """Adds a layer to others by their unique names; returns its name."""
    name, number = layer.name, 1
    while layers.setdefault(name, layer) is not layer:
        # Layers of a model inside the model may have the same name.
        name, number = f"{layer.name}_{number}", number + 1
    return name


def _end(num_keys: int) -> int:
    """The number of an index's columns: those of keys, and at least one."""
    return num_keys + COLUMNS - num_keys % COLUMNS


class ServedTable(Trackable):
    """A table's variables in an exported model: rows, keys, scales.

    They have no values in this process: TensorFlow saves their names alone.

    An updatable table of keys has, in place of keys in the order of rows, an
    index, [2, n] int64: the keys, ascending, and their rows. One variable holds
    both: a lookup never reads keys of one moment and rows of another. The index
    ends with `NO_KEY`, the largest int64, so that each key has a place in it.
    A tenth of the rows are free for new keys.

    Rows that keys without a row share are before the rows of keys.

    With `file`, how the paths of its files begin, rows and scales are mapped.
    With `key_filter` it has some of the table's keys.

    Attributes:
        name: the table's name.
        state: the table in training.
        variables: the variables by name.
        fallback_rows: the rows that keys without a row share.
        files: the files that have values of mapped variables, by their names.
        shapes: the shapes of their values; those of variables whose size may
            change are not known to TensorFlow.
        key_filter: the filter of keys; None: it has all of the table's keys.
        chosen: the keys that the filter chose for the export or its last delta,
            [n] int64 ascending; None: there is no filter, or it isn't known.
    """

    def __init__(
        self,
        state: TableState,
        rows: str | None,
        updatable: bool,
        file: str | None,
        key_filter: KeyFilter | None = None,
    ) -> None:
        self.name = state.spec.name
        self.state = state
        self.variables: dict[str, tf.Variable] = {}
        self.files: dict[str, MappedFile] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._source = state.variables
        self._saved = state.saved
        self._dtype = stored_rows.DTYPES[rows or state.spec.dtype]
        self._file = file
        num_rows, dim = state.spec.vocabulary_size, state.spec.dim
        grows, self.fallback_rows = False, range(0)
        self.key_filter = key_filter
        self.chosen = key_filter.choose(state) if key_filter else None
        if KEYS in self._source:
            num_rows, grows = len(self._exported_keys()), updatable
            if grows:
                columns, free = _end(num_rows), 1 + num_rows // 10
                self._add(INDEX, (2, columns), tf.int64, (2, None))
                self._add(FREE, (free,), tf.int64, (None,))
                num_rows += 1 + free  # With NO_ROW.
            else:
                self._add(KEYS, (num_rows,), tf.int64)
            shared = state.spec.keys.fallback_rows or 0  # type: ignore[union-attr]
            begin = NO_ROW + 1 if grows else 0
            self.fallback_rows = range(begin, begin + shared)
            num_rows += shared
        self._shape = (num_rows, dim)
        width = stored_width(self._dtype, dim)
        first = None if grows else num_rows
        self._add(PARAMETERS, (num_rows, width), self._dtype, (first, width))
        if stored_rows.has_scale(self._dtype):
            self._add(SCALE, (num_rows, 1), tf.float32, (first, 1))

    def _add(
        self,
        name: str,
        shape: tuple[int, ...],
        dtype: tf.DType,
        declared: tuple[int | None, ...] | None = None,
    ) -> None:
        """Adds a variable; None in the `declared` shape may change."""
        is_mapped = self._file is not None and name in (PARAMETERS, SCALE)
        if is_mapped:
            declared = (None, *shape[1:])  # The checkpoint's has no rows.
        variable = UninitializedVariable(
            trainable=False, name=name, shape=declared or shape, dtype=dtype
        )
        self.variables[name] = variable
        self.shapes[name] = shape
        self._track_trackable(variable, name)
        if is_mapped:
            file = MappedFile(variable, shape, f"{self._file}-{name}")
            self.files[name] = file
            self._track_trackable(file, name + MAPPED)

    @property
    def has_keys(self) -> bool:
        """Whether rows are found by keys."""
        return KEYS in self.variables or INDEX in self.variables

    @property
    def stored(self) -> StoredTable:
        """The variables as operations read them."""
        scale = self.variables.get(SCALE)
        return StoredTable(
            self.variables[PARAMETERS].handle,
            self._dtype,
            self._shape[1],
            None if scale is None else scale.handle,
        )

    def rows_of_keys(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns rows [n, dim] float32 by keys [n].

        Unknown keys have their shared rows, or zeros if there are none.
        """
        shared: Any = NO_ROW
        if self.fallback_rows:
            first, count = self.fallback_rows.start, len(self.fallback_rows)
            shared = first + key_shards.shared_rows_of(ids, count, 1)
        if INDEX in self.variables:
            return self.stored.gather(self._row_of(ids, shared))
        keys, dim = self.variables[KEYS], self._shape[1]
        if keys.shape[0] == 0:
            if self.fallback_rows:
                return self.stored.gather(shared)
            return tf.zeros([tf.size(ids), dim])
        place = tf.searchsorted(keys, ids, out_type=tf.int64)
        place = tf.minimum(place, keys.shape[0] - 1)
        known = tf.equal(tf.gather(keys, place), ids)
        if self.fallback_rows:
            own = place + self.fallback_rows.stop
            return self.stored.gather(tf.where(known, own, shared))
        rows = self.stored.gather(place)
        return tf.where(known[:, None], rows, tf.zeros_like(rows))

    def texts_of(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns the texts of keys of any shape, "" for unknown ones.

        An export that asks for none doesn't hold them.
        """
        if TEXT not in self.variables:
            rows = self._shape[0]
            with tf.init_scope():
                first = None if INDEX in self.variables else rows
                self._add(TEXT, (rows,), tf.string, (first,))
        texts = self.variables[TEXT]
        if INDEX in self.variables:
            row = self._row_of(ids)
        elif self.variables[KEYS].shape[0] == 0:
            return tf.fill(tf.shape(ids), "")
        else:
            # They are in the order of keys. The last row is for ids of no key.
            row = tf.searchsorted(self.variables[KEYS], tf.reshape(ids, [-1]))
            row = tf.reshape(row, tf.shape(ids)) + self.fallback_rows.stop
            row = tf.minimum(row, self._shape[0] - 1)
        return tf.gather(texts, row)

    def _row_of(self, ids: tf.Tensor, absent: Any = NO_ROW) -> tf.Tensor:
        """Returns the rows of keys of any shape by the index, or `absent`."""
        keys, rows = tf.unstack(self.variables[INDEX])
        flat = tf.reshape(ids, [-1])
        place = tf.searchsorted(keys, flat, out_type=tf.int64)
        known = tf.equal(tf.gather(keys, place), flat)
        row = tf.where(known, tf.gather(rows, place), absent)
        return tf.reshape(row, tf.shape(ids))

    def in_order(self) -> tuple[Any, Places, Places]:
        """Returns the number of ids, and functions of places in their order.

        They return rows' numbers and ids.
        """
        if INDEX in self.variables:
            keys, rows = tf.unstack(self.variables[INDEX])
            gathers = (functools.partial(tf.gather, v) for v in (rows, keys))
            return tf.searchsorted(keys, [NO_KEY])[0], *gathers
        first = self.fallback_rows.stop
        count, keys = self._shape[0] - first, self.variables.get(KEYS)
        if keys is None or not count:
            return count, tf.identity, tf.identity
        return (
            count,
            lambda place: first + place,
            functools.partial(tf.gather, keys),
        )

    def values(self) -> dict[str, tf.Variable]:
        """The variables that have a row for each of the table's."""
        others = (KEYS, INDEX, FREE)
        return {n: v for n, v in self.variables.items() if n not in others}

    def encode(self, rows: tf.Tensor) -> dict[str, tf.Tensor]:
        """Encodes rows, [n, dim], as the values of variables, by name.

        Raises a ValueError if the rows have values that the dtype can't hold.
        """
        with tf.device("CPU:0"):
            rows = tf.convert_to_tensor(rows)
            if rows.dtype == self._dtype:
                return {PARAMETERS: rows}
            rows = tf.cast(rows, tf.float32)
            return stored_rows.encode(self.name, rows, self._dtype)

    def blocks_of(
        self, rows: np.ndarray
    ) -> Iterator[tuple[int, dict[str, tf.Tensor]]]:
        """Yields `blocks` of rows in training, by their numbers or keys.

        No rows are one block, too.
        """
        table, shape = self._saved[PARAMETERS], [len(rows), self._shape[1]]
        for start, size in [*bundle.blocks(shape, tf.float32)] or [(0, 0)]:
            some = rows[start : start + size]
            here = self.encode(table.collect_rows(some))
            yield start, here | self._texts(some)

    def blocks(self) -> Iterator[tuple[int, dict[str, tf.Tensor]]]:
        """Yields each block's first row, and its values by variable's name.

        All workers must call this for a sharded table. Values that the dtype
        can't hold raise a ValueError.
        """
        if KEYS in self._source:
            yield from self._blocks_by_key()
            return
        table = self._saved[PARAMETERS]
        with table.reading():
            for start, size in bundle.blocks(self._shape, tf.float32):
                yield start, self.encode(table.read_rows(start, size))

    def _exported_keys(self) -> np.ndarray:
        """Returns the keys to export, ascending; all workers must call it."""
        if self.chosen is not None:
            return self.chosen
        keys: np.ndarray = self._source[KEYS].numpy()
        return keys

    def _blocks_by_key(self) -> Iterator[tuple[int, dict[str, tf.Tensor]]]:
        """Reads a table of keys, sorted by key.

        Without a filter it takes a copy of the table.
        """
        keys = self._exported_keys()
        first, end = 0, self._shape[0]
        if INDEX in self.variables:
            free = end - self.shapes[FREE][0]
            index = tf.constant(self._index(keys))
            yield 0, {INDEX: index, FREE: tf.range(free, end, dtype=tf.int64)}
            yield from self._zeros(NO_ROW, 1)
            first = NO_ROW + 1
        for start, stored in self.fallback_blocks():
            size = stored[PARAMETERS].shape[0]
            yield first + start, stored | self._no_texts(size)
        first += len(self.fallback_rows)
        for start, stored in self._blocks_of_keys(keys):
            yield first + start, stored
            if KEYS in self.variables:
                size = stored[PARAMETERS].shape[0]
                yield start, {KEYS: tf.constant(keys[start : start + size])}
        yield from self._zeros(first + len(keys), end - first - len(keys))

    def _blocks_of_keys(
        self, keys: np.ndarray
    ) -> Iterator[tuple[int, dict[str, tf.Tensor]]]:
        """Yields the rows of the exported keys in blocks."""
        if self.chosen is not None:
            yield from self.blocks_of(keys) if len(keys) else ()
            return
        rows = self._source[PARAMETERS].numpy()
        for start, size in bundle.blocks(rows.shape, tf.float32):
            here = slice(start, start + size)
            stored = self.encode(tf.constant(rows[here]))
            yield start, stored | self._texts(keys[here])

    def fallback_blocks(self) -> Iterator[tuple[int, dict[str, tf.Tensor]]]:
        """Yields `blocks` of the rows that keys without a row share."""
        if not self.fallback_rows:
            return
        table = self._saved[f"{FALLBACK}{PARAMETERS}"]
        for start, size in bundle.blocks(table.shape, tf.float32):
            yield start, self.encode(table.read_rows(start, size))

    def _zeros(
        self, first: int, count: int
    ) -> Iterator[tuple[int, dict[str, tf.Tensor]]]:
        shape = [count, self._shape[1]]
        for start, size in bundle.blocks(shape, tf.float32):
            block = self.encode(tf.zeros([size, shape[1]]))
            yield first + start, block | self._no_texts(size)

    def _no_texts(self, size: int) -> dict[str, tf.Tensor]:
        """Returns texts of rows without keys, if the export holds texts."""
        return {TEXT: tf.fill([size], "")} if TEXT in self.variables else {}

    def _texts(self, keys: np.ndarray) -> dict[str, tf.Tensor]:
        """Returns the texts of keys, if the export holds texts, by name."""
        if TEXT not in self.variables:
            return {}
        texts = self.state.key_texts
        assert texts is not None
        with tf.device("CPU:0"):
            return {TEXT: tf.constant(texts.read(keys), tf.string)}

    def _index(self, keys: np.ndarray) -> np.ndarray:
        index = np.empty(self.shapes[INDEX], np.int64)
        index[:] = [[NO_KEY], [NO_ROW]]
        index[0, : len(keys)] = keys
        first = NO_ROW + 1 + len(self.fallback_rows)
        index[1, : len(keys)] = np.arange(first, first + len(keys))
        return index
