"""Rows in variables, in the memory of one device."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import tensorflow as tf

from tfrs_embed.compat.unmirrored import gather, make_variable
from tfrs_embed.kernels import handle_packs
from tfrs_embed.ops import backend
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.update import PARAMETERS, TableUpdate, scatter_update
from tfrs_embed.optimizers.rules import Slot
from tfrs_embed.storage import allocation
from tfrs_embed.storage.row_store import RowStore, TableShare

if TYPE_CHECKING:
    from tfrs_embed.storage.row_marks import RowMarks


class MemoryRows(RowStore):
    """Keeps each table, and each slot, in one variable."""

    #: Whether tables may get more rows.
    _grows = False

    def __init__(self, device: str | None) -> None:
        super().__init__(device)
        self._variables: dict[str, dict[str, tf.Variable]] = {}

    def build(self, tables: Sequence[TableShare]) -> None:
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

    def _make(self, table: TableShare) -> None:
        made = self._variables[table.spec.name] = {}
        for name, slot in {PARAMETERS: Slot(0.0), **table.slots}.items():
            dtype = table.spec.dtype if name == PARAMETERS else tf.float32
            made[name] = self._variable(table, name, slot, tf.as_dtype(dtype))

    def _variable(
        self, table: TableShare, name: str, slot: Slot, dtype: tf.DType
    ) -> tf.Variable:
        """Makes the variable of "parameters" or a slot."""
        # Where variables are made in a graph, it may be exported.
        fill = backend.operations(self.device, training=False).fill
        row = slot.row(table.spec.dim)
        return make_variable(
            fill([table.rows, *row], tf.cast(slot.initial, dtype)),
            f"{table.spec.name}/{name}",
            [None, *row] if self._grows else None,
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
        return backend.operations(self.device, training).lookup(
            [self._variables[name][PARAMETERS] for name in used],
            [used.index(name) for name in tables],
            bags,
            dtype,
        )

    def read(self, table: str, name: str, rows: tf.Tensor) -> tf.Tensor:
        return gather(self._variables[table][name], rows)

    def read_joint(
        self,
        tables: Sequence[str],
        sizes: Sequence[int],
        rows: tf.Tensor,
        dtype: tf.DType,
    ) -> tf.Tensor | None:
        variables = [self._variables[name][PARAMETERS] for name in tables]
        if [v.shape[0] for v in variables] != [*sizes]:
            return None
        operations = backend.operations(self.device, training=True)
        return operations.read_rows(variables, rows, dtype)

    def write(
        self, table: str, name: str, rows: tf.Tensor, values: tf.Tensor
    ) -> None:
        scatter_update(self._variables[table][name], rows, values)
        if name == PARAMETERS:
            for marks in self._marks_of([table]):
                if marks is not None:
                    scatter_update(marks.variable, rows, marks.mark)

    def update(self, updates: Mapping[str, TableUpdate]) -> None:
        backend.operations(self.device, training=True).update(
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

        rows = {}
        with tf.init_scope():
            for table, variables in self._variables.items():
                handle = variables[PARAMETERS].handle
                shape = tf.raw_ops.VariableShape(input=handle)
                rows[table] = int(shape[0])
        marks = RowMarks(self.device, rows, self._grows)
        for table, variables in self._variables.items():
            for variable in variables.values():
                # Users may change it, beside the store.
                variable.on_change = functools.partial(marks.mark_some, table)
        return marks
