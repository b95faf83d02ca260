"""The interface of a store of rows: tables and their slots on one device.

Engines reach rows through `RowStore` alone, in this order:

    ids -> locate -> lookup -> check -> activations
    gradients -> commit -> update

Stores whose rows are ids need `lookup` and `update` only. Restores and initial
values change rows with the methods `assign` and `scatter_update` of the objects
that `variables` returns. A store that has to see every change returns objects
whose methods call its `write`, as `tests/numpy_rows.py` does.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.checks import Consensus
from tfrs_embed.ops.update import Marks, TableUpdate
from tfrs_embed.optimizers.rules import Slot

if TYPE_CHECKING:
    from tfrs_embed.storage.row_marks import RowMarks

#: The CPU beside a GPU.
HOST = "/device:CPU:0"


@dataclasses.dataclass(frozen=True)
class TableShare:
    """A table's share on a device.

    Attributes:
        spec: the table, of the share's width.
        rows: the number of rows at first.
        slots: the slots of the table's update rule, by name.
        trained: whether the table has an update rule.
        layer: the owner of the table, for errors.
        world: the number of devices that share the table's rows.
    """

    spec: TableSpec
    rows: int
    slots: Mapping[str, Slot]
    trained: bool = True
    layer: str = ""
    world: int = 1


class IdsOfTables(NamedTuple):
    """Ids whose rows are wanted.

    Attributes:
        tables: the ids' tables, of one width.
        ids: [n] integers.
        table_of: [n] int32, each id's table; None: there is one table.
        counts: [n] int64, how often each id occurs, 0 for padding; None: each
            once.
    """

    tables: Sequence[str]
    ids: tf.Tensor
    table_of: tf.Tensor | None = None
    counts: tf.Tensor | None = None


class Located(NamedTuple):
    """The rows of ids.

    Attributes:
        rows: for each `IdsOfTables` its ids' rows in their tables, [n].
        kept: the store's own, for `check` and `commit`.
    """

    rows: list[tf.Tensor]
    kept: Any = None


class RowStore(abc.ABC):
    """Keeps the rows of several tables, and the optimizers' slots of the rows.

    In methods `name` is "parameters" or a slot's name, and `rows` are numbers
    of rows, [n] int32 or int64. In a graph, operations run in the order in
    which they were traced.

    Args:
        device: where the rows are used; None: where TensorFlow places them.

    Attributes:
        trash: the row for the gradients of ids without a row; None: all ids
            have one.
    """

    trash: int | None = None

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
            return self._marks.marks_of(tables)
        if not tf.executing_eagerly():
            self._is_traced = True
        return [None for _ in tables]

    @abc.abstractmethod
    def build(self, tables: Sequence[TableShare]) -> None:
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

    def locate(
        self,
        ids: Sequence[IdsOfTables],
        training: bool,
        step: Any = None,
        consensus: Consensus | None = None,
    ) -> Located:
        """Finds the rows of ids; in training, reserves rows for new ids.

        Args:
            ids: the ids.
            training: whether this is part of a training step.
            step: in training the number of steps made, a scalar int64: a tensor
                or a variable.
            consensus: decides with other replicas whether there is room.

        Raises:
            RuntimeError: rows can't be found in a SavedModel.
            tf.errors.InvalidArgumentError: the ids need more rows than there
                are.
        """
        return Located([each.ids for each in ids])

    def check(
        self,
        located: Located,
        vectors: Sequence[tf.Tensor],
        bags: Sequence[BaggedIds] | None = None,
    ) -> list[tf.Tensor]:
        """Returns vectors, read again if their rows were given to other ids.

        Args:
            located: the rows.
            vectors: for each `IdsOfTables` the vectors of its bags, or of its
                rows, [n, dim].
            bags: the bags; None: the vectors are those of rows.
        """
        return list(vectors)

    def commit(
        self, located: Located, gradients: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Gives new ids the reserved rows; returns the rows to update.

        `located` is of a training step. Nothing changes if the gradients don't
        exist, as after an error. An id without a row has the row `trash`.

        Raises:
            tf.errors.InvalidArgumentError: another step has taken the rows.
        """
        return list(located.rows)

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
            bags: each feature's bags, whose ids are rows.
            training: whether this is part of a training step.
            dtype: the dtype to which the caller casts the vectors.
        """

    @abc.abstractmethod
    def read(self, table: str, name: str, rows: tf.Tensor) -> tf.Tensor:
        """Reads rows, [n, dim] or [n] of their own dtype, and no others."""

    def read_joint(
        self,
        tables: Sequence[str],
        sizes: Sequence[int],
        rows: tf.Tensor,
        dtype: tf.DType,
    ) -> tf.Tensor | None:
        """Reads rows of several tables in one operation, in a training step.

        Args:
            tables: the tables, of one width.
            sizes: their numbers of rows.
            rows: [n] int64, the numbers of rows, one table after the other.
            dtype: the vectors' dtype.

        Returns:
            [n, dim], or None: each table has to be read by itself.
        """
        return None

    @abc.abstractmethod
    def write(
        self, table: str, name: str, rows: tf.Tensor, values: tf.Tensor
    ) -> None:
        """Sets some rows; a row may occur twice, with equal values.

        `values` are [n, dim] or [n] of the rows' dtype, or one scalar for all.
        """

    def read_ahead(self, table: str, ids: tf.Tensor) -> list[tf.Operation]:
        """Begins to read the rows of ids, [n] int64, that are in files.

        Returns the operations that do so.
        """
        return []

    @abc.abstractmethod
    def update(self, updates: Mapping[str, TableUpdate]) -> None:
        """Updates rows that have gradients; `updates` have no variables."""


def host_of(device: str | None) -> str:
    """Returns the CPU for small numbers about a store's rows.

    It is the rows' own device if that is a CPU, and no copy is made.
    """
    kind = tf.DeviceSpec.from_string(device or "").device_type
    return device if device and kind == "CPU" else HOST
