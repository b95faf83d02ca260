"""A table that each replica has a copy of, seen as one."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.checkpoint.rows import HeldRows, VariableRows
from tfrs_embed.engines.tables.composite import CompositeTable


class MirroredTable(CompositeTable):
    """A table, or a slot, of which this process's replicas have a copy each.

    All copies are equal, so reading it takes one of this process, whatever the
    other workers do.

    Args:
        name: the name, "<table>/parameters" or "<table>/<slot>".
        shape: [vocabulary_size, dim], or [vocabulary_size] of a slot that has
            one number for each row.
        copies: the variables of this process's replicas.
        strategy: the strategy it was made under.
        pipelined: whether lookups outside of replicas apply deferred updates to
            all copies; if not, they read the first, and a SavedModel holds it
            alone.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        copies: Sequence[tf.Variable],
        strategy: tf.distribute.Strategy,
        pipelined: bool,
    ) -> None:
        super().__init__(name, shape, copies, strategy, copies[0].dtype)
        self._pipelined = pipelined

    @property
    def _exported_variables(self) -> Sequence[tf.Variable]:
        return self._variables if self._pipelined else self._variables[:1]

    def read_rows(self, start: int, size: int) -> tf.Tensor:
        """See the base class."""
        first = self._variables[0]
        return VariableRows(self.name, first).read_rows(start, size)

    def held(self) -> list[HeldRows]:
        """See the base class; of the copies it is the first."""
        return VariableRows(self.name, self._variables[0]).held()

    def write_rows(self, start: int, rows: tf.Tensor) -> None:
        """See the base class."""
        for copy in self._variables:
            VariableRows(self.name, copy).write_rows(start, rows)
