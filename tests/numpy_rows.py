"""A store of rows in numpy arrays: the smallest that engines can stand on.

Its arrays can be written in `NumpyRows.write` alone, which every change of rows
has to pass: a store that notes which rows have changed stands on that.
"""

import functools

import numpy as np
import tensorflow as tf

from tfrs_embed import FileStorage
from tfrs_embed.checkpoint.rows import HeldRows
from tfrs_embed.compat.unmirrored import make_variable
from tfrs_embed.ops import update as update_ops
from tfrs_embed.ops.lookup import combine
from tfrs_embed.ops.rounding import widen
from tfrs_embed.ops.stock import Stock
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import Slot
from tfrs_embed.storage.row_marks import RowMarks
from tfrs_embed.storage.row_store import RowStore
from tfrs_embed.storage.sharded import ShardedVariable
from tfrs_embed.storage.stores import STORES


class ArrayStorage(FileStorage):
    """Keeps a table in numpy arrays; its folder means nothing."""


STORES[ArrayStorage] = __name__, "NumpyRows"


class NumpyRows(RowStore):
    """Keeps each table, and each slot, in one array."""

    def __init__(self, device):
        super().__init__(device)
        self._tables = {}

    def build(self, tables):
        self._order = make_variable(tf.constant(0, tf.int64), "order")
        for table in tables:
            dim = table.spec.dim
            slots = {PARAMETERS: Slot(0.0), **table.slots}
            self._tables[table.spec.name] = {
                name: _Array(
                    self,
                    table.spec.name,
                    name,
                    np.full(
                        [table.rows, *slot.row(dim)],
                        slot.initial,
                        table.spec.dtype if name == PARAMETERS else np.float32,
                    ),
                )
                for name, slot in slots.items()
            }

    def variables(self, table):
        return self._tables[table]

    def lookup(self, tables, bags, training, dtype):
        return [
            combine(widen(self.read(name, PARAMETERS, b.ids)), None, b)
            for name, b in zip(tables, bags, strict=True)
        ]

    def read(self, table, name, rows):
        return self._tables[table][name].sparse_read(rows)

    def write(self, table, name, rows, values):
        array = self._tables[table][name].array

        def write(rows, values):
            array.flags.writeable = True
            array[rows] = values
            array.flags.writeable = False
            return np.int64(1)

        # What only had to be waited for would be left out.
        self.called([], self.call(write, [rows, values], tf.int64))
        for marks in self._marks_of([table]):
            if marks is not None:
                update_ops.scatter_update(marks.variable, rows, marks.mark)

    def update(self, updates):
        for name, each in updates.items():
            ids, gradients = Stock().row_gradients(each.contributions)
            update_ops.update_unique(
                each._replace(variables=self._tables[name]), ids, gradients
            )

    def _make_marks(self):
        rows = {
            table: len(parts[PARAMETERS].array)
            for table, parts in self._tables.items()
        }
        return RowMarks(self.device, rows)

    def call(self, function, inputs, dtype):
        """Calls a function of arrays after all that was written before.

        TensorFlow lets one replica's calls wait for another's where they have
        state; so a variable that each call reads, and then writes, says the
        order.
        """
        return tf.numpy_function(
            lambda order, *arrays: function(*arrays),
            [self._order.read_value(), *inputs],
            dtype,
            stateful=False,
        )

    def called(self, after, number):
        """Has later calls wait for tensors: adds a number to the order."""
        with tf.control_dependencies(after):
            self._order.assign_add(number)


class _Array(ShardedVariable):
    """An array, as engines, checkpoints and SavedModels see a variable."""

    def __init__(self, store, table, part, array):
        strategy = tf.distribute.get_strategy()
        dtype = tf.as_dtype(array.dtype)
        name = f"{table}/{part}"
        super().__init__(name, array.shape, [], strategy, dtype)
        self.device = store.device or "CPU:0"
        self.array = array
        self.array.flags.writeable = False
        self._store = store
        self._write = functools.partial(store.write, table, part)

    def sparse_read(self, indices, name=None):
        rows = self._store.call(
            lambda ids: self.array[ids], [indices], self.dtype
        )
        self._store.called([rows], 0)
        return tf.ensure_shape(rows, [None, *self.shape[1:]])

    def scatter_update(self, slices):
        self._write(slices.indices, slices.values)

    def read_rows(self, start, size):
        return tf.constant(self.array[start : start + size])

    def write_rows(self, numbers, rows):
        self._write(tf.constant(numbers, tf.int64), rows)

    def held(self):
        return [HeldRows(len(self.array), self.array.nbytes, self.sparse_read)]
