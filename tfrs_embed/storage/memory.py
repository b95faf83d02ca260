"""Rows in variables, in the memory of one device or in mapped files."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from tfrs_embed.compat import graphs
from tfrs_embed.compat.unmirrored import gather, make_variable
from tfrs_embed.kernels import handle_packs
from tfrs_embed.ops import backend
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.update import PARAMETERS, TableUpdate, scatter_update
from tfrs_embed.optimizers.rules import Slot
from tfrs_embed.storage import allocation
from tfrs_embed.storage.row_store import RowStore, StoredTable, host_of

if TYPE_CHECKING:
    from tfrs_embed.storage.row_marks import RowMarks

# A table that grows gets one spare row for this many rows.
_SPARE_PART = 32


class MemoryRows(RowStore):
    """Keeps each table, and each slot, in one variable.

    The memory of a table with a `FileStorage` is mapped files.
    """

    def __init__(self, device: str | None) -> None:
        super().__init__(device)
        self._variables: dict[str, dict[str, tf.Variable]] = {}
        self._slots: dict[str, dict[str, Slot]] = {}

    def build(self, tables: Sequence[StoredTable]) -> None:
        with tf.init_scope(), tf.device(self.device):
            for table in tables:
                shape = (table.rows, table.spec.dim)
                slots = [s.row(table.spec.dim) for s in table.slots.values()]
                with allocation.naming(
                    f"Table '{table.spec.name}'",
                    shape,
                    table.spec.dtype,
                    sum(map(math.prod, slots)),
                    self.device,
                ):
                    self._make(table)
            self._pack = handle_packs.HandlePack(
                v for made in self._variables.values() for v in made.values()
            )

    def _make(self, table: StoredTable) -> None:
        spec = table.spec
        made = self._variables[spec.name] = {}
        slots = {PARAMETERS: Slot(0.0), **table.slots}
        self._slots[spec.name] = slots
        # Where variables are made in a graph, it may be exported.
        fill = backend.of(self.device, training=False).fill
        files = None
        if spec.storage is not None:
            from tfrs_embed.storage.mapped_files import TableFiles

            files = TableFiles(spec, self.device)
        for name, slot in slots.items():
            row = slot.row(spec.dim)
            dtype = spec.dtype if name == PARAMETERS else tf.float32
            if files is not None:
                made[name] = files.make(
                    name,
                    [table.rows, *row],
                    tf.as_dtype(dtype),
                    slot.initial,
                    f"{spec.name}/{name}",
                )
                continue
            made[name] = make_variable(
                fill([table.rows, *row], tf.cast(slot.initial, dtype)),
                f"{spec.name}/{name}",
                # A table with keys can grow.
                None if spec.keys is None else [None, *row],
            )

    def variables(self, table: str) -> dict[str, tf.Variable]:
        return self._variables[table]

    def lookup(
        self,
        tables: Sequence[str],
        bags: Sequence[BaggedIds],
        training: bool,
        dtype: tf.DType,
    ) -> list[tf.Tensor]:
        used = list(dict.fromkeys(tables))
        return backend.of(self.device, training).lookup(
            [self._variables[name][PARAMETERS] for name in used],
            [used.index(name) for name in tables],
            bags,
            dtype,
        )

    def read(self, table: str, name: str, rows: tf.Tensor) -> tf.Tensor:
        return gather(self._variables[table][name], rows)

    def write(
        self, table: str, name: str, rows: tf.Tensor, values: tf.Tensor
    ) -> None:
        scatter_update(self._variables[table][name], rows, values)
        if name == PARAMETERS:
            for marks in self._marks_of([table]):
                if marks is not None:
                    scatter_update(marks.variable, rows, marks.mark)

    def update(self, updates: Mapping[str, TableUpdate]) -> None:
        backend.of(self.device, training=True).update(
            [
                each._replace(variables=self._variables[name], marks=marks)
                for (name, each), marks in zip(
                    updates.items(), self._marks_of(updates), strict=True
                )
            ]
        )

    def _make_marks(self) -> RowMarks:
        # Few programs track changes.
        from tfrs_embed.storage.row_marks import RowMarks

        rows, growing = {}, []
        with tf.init_scope():
            for table, variables in self._variables.items():
                parameters = variables[PARAMETERS]
                shape = tf.raw_ops.VariableShape(input=parameters.handle)
                rows[table] = int(shape[0])
                if parameters.shape[0] is None:
                    growing.append(table)
        marks = RowMarks(self.device, rows, growing)
        for table, variables in self._variables.items():
            for variable in variables.values():
                # Users may change it, beside the store.
                variable.on_change = functools.partial(marks.mark_some, table)
        return marks

    def resize(self, rows: Mapping[str, tf.Tensor]) -> None:
        for table, number in rows.items():
            variables, slots = self._variables[table], self._slots[table]
            [dim] = variables[PARAMETERS].shape[1:]
            handles = [variables[name].handle for name in slots]
            values = [
                (s.initial, s.row(dim), tf.float32) for s in slots.values()
            ]
            if self._marks is not None:
                handles.append(self._marks.variables[table].handle)
                values.append((0.0, (), tf.uint8))
            with tf.device(self.device):
                _grow(number, handles, tuple(values), host_of(self.device))


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
