"""The interface of what keeps tables' rows on one device.

Engines look up and update rows by it alone. Steps change rows in `update` and
`write`. Restores and first values change them by `scatter_update` and `assign`
of what `variables` returns: a store that has to know which rows have changed
returns objects whose methods call its `write`.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.update import TableUpdate
from tfrs_embed.optimizers.rules import Slot


@dataclasses.dataclass(frozen=True)
class StoredTable:
    """A table's share on a device.

    Attributes:
        spec: the table, of the share's width.
        rows: the number of rows at first.
        slots: the slots of the table's update rule, by name.
    """

    spec: TableSpec
    rows: int
    slots: Mapping[str, Slot]


class RowStore(abc.ABC):
    """Keeps the rows of tables, and the optimizers' slots of these rows.

    It takes many tables at once, as the kernels do. A name is a slot's, or
    "parameters". Operations run in graphs in the order they are written in.

    Args:
        device: where the rows are used; None: where TensorFlow places them.
    """

    def __init__(self, device: str | None) -> None:
        self.device = device

    @abc.abstractmethod
    def build(self, tables: Sequence[StoredTable]) -> None:
        """Makes tables: rows of zeros, and slots of their initial values.

        Raises:
            tf.errors.ResourceExhaustedError: there is no room for one.
        """

    @abc.abstractmethod
    def variables(self, table: str) -> dict[str, Any]:
        """What checkpoints and SavedModels hold of a table, by name.

        Returns:
            Variables, or objects that have of a variable `shape`, `dtype`,
            `device`, `numpy`, `assign`, `sparse_read` and `scatter_update`.
        """

    @abc.abstractmethod
    def lookup(
        self,
        tables: Sequence[str],
        bags: Sequence[BaggedIds],
        training: bool,
        dtype: tf.DType,
    ) -> list[tf.Tensor]:
        """Looks up features.

        Args:
            tables: each feature's table.
            bags: each feature's bags.
            training: whether this is a training step.
            dtype: what the vectors will be cast to.

        Returns:
            Each feature's vectors, as `tfrs_embed.ops.stock.Stock.lookup`
            gives them.
        """

    @abc.abstractmethod
    def read(self, table: str, name: str, rows: tf.Tensor) -> tf.Tensor:
        """Returns rows, [n, dim] or [n] of their own dtype; reads no others.

        Args:
            table: the table.
            name: "parameters" or a slot's.
            rows: [n] int32 or int64, their numbers.
        """

    @abc.abstractmethod
    def write(
        self, table: str, name: str, rows: tf.Tensor, values: tf.Tensor
    ) -> None:
        """Sets rows.

        Args:
            table: the table.
            name: "parameters" or a slot's.
            rows: [n] int32 or int64, unique, or equal ones with equal values.
            values: [n, dim] or [n] of the rows' dtype; or a scalar, for all.
        """

    @abc.abstractmethod
    def update(self, updates: Mapping[str, TableUpdate]) -> None:
        """Updates the rows that gradients are for.

        Args:
            updates: each table's update by name, without variables.
        """

    @abc.abstractmethod
    def count(self, table: str) -> tf.Tensor:
        """The number of rows that a table has, a scalar int64."""

    @abc.abstractmethod
    def resize(self, rows: Mapping[str, tf.Tensor]) -> None:
        """Adds rows to tables of keys up to a number, with some to spare.

        They are zeros, and their slots the initial values. A table that has as
        many rows stays what it is.

        Args:
            rows: each table's number of rows, a scalar int64.
        """

    @abc.abstractmethod
    def drop(self) -> None:
        """Frees all rows, as another table has found no room."""
