"""The tables of an exported model.

While a model is traced for serving, its layers look ids up in these tables and
not in their engines. The values of these tables are in the exported files
alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint import bundle
from tfrs_embed.checkpoint.rows import KEYS, SCALE, Rows, VariableRows
from tfrs_embed.compat.graphs import SERVED_TABLES
from tfrs_embed.compat.private_tensorflow import (
    Trackable,
    UninitializedVariable,
)
from tfrs_embed.ops import backend
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.lookup import combine
from tfrs_embed.ops.stored_table import StoredTable, stored_width
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.serving import rows as stored_rows
from tfrs_embed.storage.table_state import TableState


class ServedTables:
    """The tables of an exported model, with rows of a dtype, or their own."""

    def __init__(self, rows: str | None) -> None:
        self._rows = rows
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
            if KEYS in table.variables:
                rows = table.rows_of_keys(bags[i].ids)
                found[i] = combine(rows, None, bags[i])
        places = [i for i in range(len(tables)) if i not in found]
        different = list(dict.fromkeys(tables[i] for i in places))
        # One operation for all of them, where there are kernels.
        vectors = backend.of(None, training=False).lookup_stored(
            [table.stored for table in different],
            [different.index(tables[i]) for i in places],
            [bags[i] for i in places],
        )
        found.update(zip(places, vectors, strict=True))
        return [found[i] for i in range(len(tables))]

    def _table(self, layer: Any, state: TableState) -> ServedTable:
        name, number = layer.name, 1
        while self.layers.get(name, layer) is not layer:
            # Layers of a model inside the model may have the same name.
            name, number = f"{layer.name}_{number}", number + 1
        self.layers[name] = layer
        tables, table = self.by_layer.setdefault(name, {}), state.spec.name
        if table not in tables:
            with tf.init_scope():
                tables[table] = ServedTable(state, self._rows)
        return tables[table]

    @property
    def nbytes(self) -> int:
        """The size of all tables in bytes."""
        return sum(
            variable.shape.num_elements() * variable.dtype.size
            for table in self
            for variable in table.variables.values()
        )

    def __iter__(self) -> Iterator[ServedTable]:
        """The tables, layer after layer."""
        for tables in self.by_layer.values():
            yield from tables.values()


class ServedTable(Trackable):
    """A table's variables in an exported model: rows, keys, scales.

    They have no values in this process: TensorFlow saves their names alone.
    """

    def __init__(self, state: TableState, rows: str | None) -> None:
        self.name = state.spec.name
        self.variables: dict[str, tf.Variable] = {}
        self._source = state.variables
        self._dtype = stored_rows.DTYPES[rows or state.spec.dtype]
        num_rows, dim = state.spec.vocabulary_size, state.spec.dim
        if KEYS in self._source:
            num_rows = len(self._source[KEYS].numpy())
            self._add(KEYS, (num_rows,), tf.int64)
        self._shape = (num_rows, dim)
        width = stored_width(self._dtype, dim)
        self._add(PARAMETERS, (num_rows, width), self._dtype)
        if stored_rows.has_scale(self._dtype):
            self._add(SCALE, (num_rows, 1), tf.float32)

    def _add(self, name: str, shape: tuple[int, ...], dtype: tf.DType) -> None:
        variable = UninitializedVariable(
            trainable=False, name=name, shape=shape, dtype=dtype
        )
        self.variables[name] = variable
        self._track_trackable(variable, name)

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
        """Returns rows [n, dim] float32 by keys [n]; zeros for unknown ones."""
        keys, dim = self.variables[KEYS], self._shape[1]
        if keys.shape[0] == 0:
            return tf.zeros([tf.size(ids), dim])
        place = tf.searchsorted(keys, ids, out_type=tf.int64)
        place = tf.minimum(place, keys.shape[0] - 1)
        known = tf.equal(tf.gather(keys, place), ids)
        rows = self.stored.gather(place)
        return tf.where(known[:, None], rows, tf.zeros_like(rows))

    def blocks(self) -> Iterator[tuple[int, dict[str, tf.Tensor]]]:
        """Yields each block's first row, and its values by variable's name.

        All workers must call this for a sharded table. Values that the dtype
        can't hold raise a ValueError.
        """
        if KEYS in self._source:
            yield from self._blocks_by_key()
            return
        table = self._source[PARAMETERS]
        if not isinstance(table, Rows):
            table = VariableRows(self.name, table)
        with table.reading():
            for start, size in bundle.blocks(self._shape, tf.float32):
                rows = table.read_rows(start, size)
                with tf.device("CPU:0"):
                    rows = tf.cast(rows, tf.float32)
                    stored = stored_rows.encode(self.name, rows, self._dtype)
                yield start, stored

    def _blocks_by_key(self) -> Iterator[tuple[int, dict[str, tf.Tensor]]]:
        """Reads a table of keys, sorted by key, which takes a copy of it."""
        keys, rows = (self._source[n].numpy() for n in (KEYS, PARAMETERS))
        with tf.device("CPU:0"):
            for start, size in bundle.blocks(self._shape, tf.float32):
                here = slice(start, start + size)
                stored = stored_rows.encode(
                    self.name, tf.constant(rows[here]), self._dtype
                )
                yield start, {KEYS: tf.constant(keys[here]), **stored}
