"""A table's parameters and slots by name, as its checkpoint holds them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint import growth, saver
from tfrs_embed.checkpoint.bundle import blocks
from tfrs_embed.checkpoint.names import in_saved_model
from tfrs_embed.checkpoint.rate import LEARNING_RATE, SavedRate
from tfrs_embed.checkpoint.rows import HeldRows, Saved, VariableRows
from tfrs_embed.compat.private_tensorflow import Trackable
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.storage.initial_values import initial_blocks


class TableState(Trackable):
    """A table's parameters and slots by name: variables, or objects like them.

    A checkpoint holds them as `<table>/parameters` and `<table>/<slot>`. If a
    checkpoint was read before they exist, they are restored as they are added.
    The optimizer's learning rate is saved with them, unless it is computed.

    Args:
        spec: the table.
        optimizer: the table's optimizer; None: no engine trains it.

    Attributes:
        rule_slots: the slots of the optimizer's rule, by name.
    """

    def __init__(
        self, spec: TableSpec, optimizer: TableOptimizer | None = None
    ) -> None:
        self.spec = spec
        self.variables: dict[str, Any] = {}
        self.rule_slots = optimizer.rule.slots() if optimizer else {}
        self._growing = False
        self._saved: dict[str, Saved] = {}
        if optimizer is not None:
            rate = SavedRate(f"{spec.name}/{LEARNING_RATE}", optimizer)
            self._track_trackable(rate, LEARNING_RATE)

    def add(self, name: str, variable: Any) -> None:
        """Adds the variable `name`: "parameters" or a slot's name."""
        self.variables[name] = variable
        saved = (
            variable
            if isinstance(variable, Saved)
            else VariableRows(f"{self.spec.name}/{name}", variable)
        )
        saved.initial = lambda start: self._initial(name, start)
        saved.growing = self._growing
        self._saved[name] = saved
        saver.mark(variable, saved)
        # This restores a value that a checkpoint is waiting to restore.
        self._track_trackable(variable, name, overwrite=True)

    def _initial(
        self, name: str, first: int
    ) -> Iterator[tuple[int, tf.Tensor]]:
        """Yields a variable's initial rows from row `first` on."""
        if name != PARAMETERS:
            slot = self.rule_slots[name]
            row = slot.row(self.spec.dim)
            count = self.spec.vocabulary_size - first
            for start, size in blocks([count, *row], tf.float32):
                yield first + start, tf.fill([size, *row], slot.initial)
            return
        for start, rows in initial_blocks(self.spec):
            cut = max(0, first - start)
            if cut < rows.shape[0]:
                yield start + cut, rows[cut:]

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        for saved in self._saved.values():
            saved.exporting = save_type == "savedmodel"
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel":
            # Its functions keep the variable.
            children.pop(LEARNING_RATE, None)
        return children

    def _checkpoint_adapter(self, path: str) -> None:
        # The children may be restored much later.
        self._growing = growth.allowed()
        for saved in self._saved.values():
            saved.growing = self._growing

    def step_restored(self) -> None:
        """Called when the layer's step exists and, if pending, was restored."""

    def held(self, name: str) -> list[HeldRows]:
        """Returns this process's rows of "parameters" or a slot."""
        return self._saved[name].held()

    @property
    def table(self) -> Any:
        """The rows, [vocabulary_size, dim] of the table's dtype."""
        return self.variables[PARAMETERS]

    @property
    def slots(self) -> dict[str, Any]:
        """The slots by name: of the table's shape, or a number for each row."""
        return {k: v for k, v in self.variables.items() if k != PARAMETERS}


class Tables(Trackable, Mapping[str, TableState]):
    """The states of a layer's tables, by table name; a read-only mapping."""

    def __init__(self, states: Iterable[TableState] = ()) -> None:
        self._states: dict[str, TableState] = {}
        for state in states:
            self.add(state)

    def add(self, state: TableState) -> None:
        """Adds a table's state under the table's name."""
        self._states[state.spec.name] = state
        self._track_trackable(state, state.spec.name)

    def __getitem__(self, name: str) -> TableState:
        return self._states[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    # Mappings compare by content and have no hash. TensorFlow tracks objects by
    # identity.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type != "savedmodel":
            return children
        return {in_saved_model(k): child for k, child in children.items()}

    def _lookup_dependency(self, name: str, *args: Any, **kwargs: Any) -> Any:
        found = super()._lookup_dependency(name, *args, **kwargs)
        if found is None:
            # Keras looks up names that are in a SavedModel.
            for table, state in self._states.items():
                if table != name and in_saved_model(table) == name:
                    return state
        return found
