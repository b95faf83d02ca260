"""Rows in memory, of tables that get more rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import graphs
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import Slot
from tfrs_embed.storage.memory import MemoryRows
from tfrs_embed.storage.row_store import host_of

# A table that grows gets one spare row for this many rows.
_SPARE_PART = 32


class GrowingRows(MemoryRows):
    """Keeps each table, and each slot, in one variable that can grow."""

    _grows = True

    def make_room(
        self, table: str, rows: Any, slots: Mapping[str, Slot]
    ) -> None:
        """Gives a table at least `rows` rows, int64, and some to spare.

        New rows are zeros, and their slots have the initial values. A table
        that has enough rows stays as it is.
        """
        slots = {PARAMETERS: Slot(0.0), **slots}
        variables = self.variables(table)
        [dim] = variables[PARAMETERS].shape[1:]
        handles = [variables[name].handle for name in slots]
        values = [(s.initial, s.row(dim), tf.float32) for s in slots.values()]
        if self._marks is not None:
            handles.append(self._marks.variables[table].handle)
            values.append((0.0, (), tf.uint8))
        with tf.device(self.device):
            _grow(rows, handles, tuple(values), host_of(self.device))


# For each of a table's variables its initial value, a row's shape, its dtype.
_Slots = tuple[tuple[float, tuple[int, ...], tf.DType], ...]


# A function, so that several branches share one trace. It takes handles, since
# TensorFlow keeps graphs, which would keep variables alive.
@tf.function(autograph=False, **graphs.NOT_INLINED)
def _grow(
    rows: tf.Tensor, handles: list[tf.Tensor], slots: _Slots, host: str
) -> None:
    """Gives a table's variables at least `rows` rows, and some to spare."""
    shape = tf.raw_ops.VariableShape(input=handles[0])
    with tf.device(host):
        here = tf.cast(shape[0], tf.int64)
        lacking = rows > here

    def grow() -> tf.Tensor:
        with tf.device(host):
            more = rows - here + rows // _SPARE_PART
            sizes = [tf.stack([more, *row]) for _, row, _ in slots]
        for handle, size, (value, _, dtype) in zip(
            handles, sizes, slots, strict=True
        ):
            before = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            added = tf.fill(size, tf.cast(value, dtype))
            tf.raw_ops.AssignVariableOp(
                resource=handle, value=tf.concat([before, added], 0)
            )
        return tf.constant(True)

    tf.cond(lacking, grow, lambda: tf.constant(False))
