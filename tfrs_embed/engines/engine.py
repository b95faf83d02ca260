"""What every engine is: the interface, and the state of a table."""

from __future__ import annotations

import abc
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs import FeatureSpec, TableSpec
from tfrs_embed.ops.bags import Bags
from tfrs_embed.optimizers import TableOptimizer


class TableState(tf.__internal__.tracking.Trackable):
    """A table's variables: its parameters and slots, by name.

    A checkpoint holds them as `<table>/parameters` and `<table>/<slot>`, and
    restores them when they are created if it was read before.

    Args:
        spec: the table.
    """

    def __init__(self, spec: TableSpec) -> None:
        self.spec = spec
        self.variables: dict[str, tf.Variable] = {}

    def add(self, name: str, variable: tf.Variable) -> None:
        """Adds the variable `name`: "parameters" or a slot's name."""
        self.variables[name] = variable
        self._track_trackable(variable, name, overwrite=True)

    @property
    def table(self) -> tf.Variable:
        """The rows, [vocabulary_size, dim] float32."""
        return self.variables["parameters"]

    @property
    def slots(self) -> dict[str, tf.Variable]:
        """The slots by name, each of the table's shape."""
        return {k: v for k, v in self.variables.items() if k != "parameters"}


class Tables(tf.__internal__.tracking.Trackable):
    """The states of a layer's tables by name: what its checkpoint holds.

    Args:
        states: the states to begin with.
    """

    def __init__(self, states: Iterable[TableState] = ()) -> None:
        self._states: dict[str, TableState] = {}
        for state in states:
            self.add(state)

    def add(self, state: TableState) -> None:
        """Puts a table's state under the table's name."""
        self._states[state.spec.name] = state
        self._track_trackable(state, state.spec.name)

    def __getitem__(self, name: str) -> TableState:
        """The state of the table `name`."""
        return self._states[name]


class Engine(abc.ABC):
    """Looks ids up in tables, and trains the tables.

    Args:
        features: the features to look up, in the order of each call.
        optimizers: each table's optimizer by the table's name, or None for a
            table that is not trained.
    """

    def __init__(
        self,
        features: Sequence[FeatureSpec],
        optimizers: dict[str, TableOptimizer | None],
    ) -> None:
        self.features = tuple(features)
        self.optimizers = optimizers
        self.states: dict[str, TableState] = {}
        for feature in features:
            table = feature.table
            if table.name not in self.states:
                self.states[table.name] = TableState(table)

    @abc.abstractmethod
    def build(self) -> None:
        """Creates the variables."""

    @property
    @abc.abstractmethod
    def step(self) -> tf.Variable:
        """The number of updates made, a scalar int64 variable."""

    @abc.abstractmethod
    def lookup(
        self, bags: Sequence[Bags], training: bool
    ) -> tuple[list[tf.Tensor], Any]:
        """Looks up each feature's ids.

        Args:
            bags: each feature's bags.
            training: whether the tables are about to be updated.

        Returns:
            Each feature's activations, [count, dim] float32, and what
            `apply_gradients` needs to know about them.
        """

    @abc.abstractmethod
    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        """Updates the tables.

        Args:
            residuals: what `lookup` returned.
            gradients: each feature's, [count, dim] float32.
        """

    def drain(self) -> None:
        """Applies the updates that pipelining has put off."""
        return

    def drop_pending(self) -> None:
        """Forgets the updates that pipelining has put off."""
        return

    @property
    def variables(self) -> list[tf.Variable]:
        """All variables: tables, their slots, the step."""
        variables = [
            v for s in self.states.values() for v in s.variables.values()
        ]
        return [*variables, self.step]


def initial_value(table: TableSpec) -> tf.Tensor:
    """Returns a table's initial rows, [vocabulary_size, dim] float32.

    Raises:
        ValueError: the initializer returned something else.
    """
    shape = (table.vocabulary_size, table.dim)
    initializer = table.initializer
    try:
        parameters = len(inspect.signature(initializer).parameters)
    except (TypeError, ValueError):
        parameters = 2
    # TF documents initializers of a shape alone; its own take a dtype too.
    rows = (
        initializer(shape, tf.float32) if parameters > 1 else initializer(shape)
    )
    rows = tf.convert_to_tensor(rows)
    if tuple(rows.shape) != shape or rows.dtype != tf.float32:
        raise ValueError(
            f"Table '{table.name}': its initializer returned "
            f"{rows.dtype.name} of shape {tuple(rows.shape)}, not float32 of "
            f"shape {shape}."
        )
    return rows
