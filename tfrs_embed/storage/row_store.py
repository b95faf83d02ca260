"""The interface of a store of rows: tables and their slots on one device.

Engines reach rows through `RowStore` alone. A training step changes rows with
`update` and `write`, and `resize` adds rows. Restores and initial values change
rows with the methods `assign` and `scatter_update` of the objects that
`variables` returns. A store that has to see every change returns objects whose
methods call its `write`, as `tests/numpy_rows.py` does.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.update import Marks, TableUpdate
from tfrs_embed.optimizers.rules import Slot

if TYPE_CHECKING:
    from tfrs_embed.storage.row_marks import RowMarks

#: The CPU beside a GPU.
HOST = "/device:CPU:0"


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
    """Keeps the rows of several tables, and the optimizers' slots of the rows.

    In methods `name` is "parameters" or a slot's name, and `rows` are numbers
    of rows, [n] int32 or int64. In a graph, operations run in the order in
    which they were traced.

    Args:
        device: where the rows are used; None: where TensorFlow places them.
    """

    def __init__(self, device: str | None) -> None:
        self.device = device
        self._marks: RowMarks | None = None
        self._is_traced = False

    @property
    def marks(self) -> RowMarks:
        """The marks of changed rows, after `track`."""
        assert self._marks is not None
        return self._marks

    def track(self) -> None:
        """Begins to mark the rows that change.

        Raises:
            RuntimeError: a step was traced before, which would mark none.
        """
        if self._is_traced:
            raise RuntimeError(
                "Changes of tables can't be tracked any more: a training step "
                "was traced before. Call track_changes, or make the "
                "DeltaManager, before the first step."
            )
        self._marks = self._make_marks()

    @abc.abstractmethod
    def _make_marks(self) -> RowMarks:
        """Makes the marks of all rows."""

    def _marks_of(self, tables: Iterable[str]) -> Sequence[Marks | None]:
        """Where changes of tables are to be marked; None: they are not."""
        if self._marks is not None:
            return self._marks.of(tables)
        if not tf.executing_eagerly():
            self._is_traced = True
        return [None for _ in tables]

    @abc.abstractmethod
    def build(self, tables: Sequence[StoredTable]) -> None:
        """Makes tables: rows of zeros, and slots with their initial values.

        Raises:
            tf.errors.ResourceExhaustedError: the device lacks memory.
        """

    @abc.abstractmethod
    def variables(self, table: str) -> dict[str, Any]:
        """Returns what checkpoints and SavedModels hold of a table, by name.

        Returns:
            Variables, or objects with a variable's `shape`, `dtype`, `device`,
            `numpy`, `assign`, `sparse_read` and `scatter_update`.
        """

    @abc.abstractmethod
    def lookup(
        self,
        tables: Sequence[str],
        bags: Sequence[BaggedIds],
        training: bool,
        dtype: tf.DType,
    ) -> list[tf.Tensor]:
        """Looks up features' bags; returns vectors as `Stock.lookup` does.

        Args:
            tables: each feature's table.
            bags: each feature's bags.
            training: whether this is part of a training step.
            dtype: the dtype to which the caller casts the vectors.
        """

    @abc.abstractmethod
    def read(self, table: str, name: str, rows: tf.Tensor) -> tf.Tensor:
        """Reads rows, [n, dim] or [n] of their own dtype, and no others."""

    @abc.abstractmethod
    def write(
        self, table: str, name: str, rows: tf.Tensor, values: tf.Tensor
    ) -> None:
        """Sets some rows; a row may occur twice, with equal values.

        `values` are [n, dim] or [n] of the rows' dtype, or one scalar for all.
        """

    @abc.abstractmethod
    def update(self, updates: Mapping[str, TableUpdate]) -> None:
        """Updates rows that have gradients; `updates` have no variables."""

    @abc.abstractmethod
    def resize(self, rows: Mapping[str, tf.Tensor]) -> None:
        """Gives tables of keys at least `rows` rows each, and some to spare.

        The numbers are scalars int64. New rows are zeros, and their slots have
        the initial values. A table that has enough rows stays as it is.
        """


def host_of(device: str | None) -> str:
    """Returns the CPU for small numbers about a store's rows.

    It is the rows' own device if that is a CPU, and no copy is made.
    """
    kind = tf.DeviceSpec.from_string(device or "").device_type
    return device if device and kind == "CPU" else HOST
