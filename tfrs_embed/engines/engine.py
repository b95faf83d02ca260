"""What every engine is: the interface, and the state of a table."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint import growth, saver
from tfrs_embed.checkpoint.bundle import blocks
from tfrs_embed.checkpoint.names import in_saved_model
from tfrs_embed.checkpoint.rate import LEARNING_RATE, SavedRate
from tfrs_embed.checkpoint.rows import Saved, VariableRows
from tfrs_embed.configs import FeatureSpec, TableSpec
from tfrs_embed.engines.initial_values import initial_blocks
from tfrs_embed.engines.shard import distinct
from tfrs_embed.ops.bags import Bags
from tfrs_embed.ops.checks import Consensus
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers import TableOptimizer

#: What a table's checkpoint calls the rate of its optimizer.


class TableState(tf.__internal__.tracking.Trackable):
    """A table's variables, or what is like them: parameters and slots by name.

    A checkpoint holds them as `<table>/parameters` and `<table>/<slot>`, and
    restores them when they are created if it was read before. Beside them it
    has the optimizer's learning rate, unless that is computed.

    Args:
        spec: the table.
        optimizer: what trains it; None: nothing here.
    """

    def __init__(
        self, spec: TableSpec, optimizer: TableOptimizer | None = None
    ) -> None:
        self.spec = spec
        self.variables: dict[str, Any] = {}
        self._slots = optimizer.rule.slots() if optimizer else {}
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
        # What was restored before is written now.
        self._track_trackable(variable, name, overwrite=True)

    def _initial(
        self, name: str, first: int
    ) -> Iterator[tuple[int, tf.Tensor]]:
        """Makes the initial rows of a variable from a row on."""
        shape = [self.spec.vocabulary_size, self.spec.dim]
        if name != PARAMETERS:
            for start, size in blocks([shape[0] - first, shape[1]], tf.float32):
                value = self._slots[name]
                yield first + start, tf.fill([size, shape[1]], value)
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
            # Its functions hold the variable that they read.
            children.pop(LEARNING_RATE, None)
        return children

    def _checkpoint_adapter(self, path: str) -> None:
        # Asked before what is below is restored, which may be much later.
        self._growing = growth.allowed()
        for saved in self._saved.values():
            saved.growing = self._growing

    @property
    def table(self) -> Any:
        """The rows, [vocabulary_size, dim] float32."""
        return self.variables[PARAMETERS]

    @property
    def slots(self) -> dict[str, Any]:
        """The slots by name, each of the table's shape."""
        return {k: v for k, v in self.variables.items() if k != PARAMETERS}


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
            # Keras looks for what it finds in a SavedModel.
            for table, state in self._states.items():
                if table != name and in_saved_model(table) == name:
                    return state
        return found


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
                self.states[table.name] = TableState(
                    table, optimizers[table.name]
                )

    @abc.abstractmethod
    def build(self) -> None:
        """Creates the variables."""

    @property
    def ready(self) -> bool:
        """Whether all is known that `build` needs."""
        return True

    def expect(self, bags: Sequence[Bags | None]) -> None:
        """Takes from a call's bags what `build` needs to know.

        Args:
            bags: each feature's bags, None if the call leaves it out.
        """
        return

    def require_all(self, given: Sequence[bool]) -> None:
        """Requires a call's features to be all of them, if the engine does.

        Args:
            given: which of the features the call has ids for.

        Raises:
            NotImplementedError: it does, and some are left out.
        """
        return

    def measure(self, bags: Sequence[Bags]) -> None:
        """Raises the limits of hardware that has them to what a batch needs.

        Args:
            bags: each feature's bags in a global batch, executing eagerly.
        """
        return

    def follow_step(self) -> None:
        """Lets the optimizers' learning rates follow this engine's step."""
        for optimizer in distinct(self.optimizers):
            optimizer.follow(lambda: self.step)

    @property
    @abc.abstractmethod
    def step(self) -> Any:
        """The number of updates made: a scalar int64 variable, or like one."""

    @property
    def held_whole(self) -> bool:
        """Whether each table is one variable."""
        return True

    @property
    def local_replicas(self) -> int:
        """The number of replicas that train the tables in this process."""
        return 1

    def consensus(self, training: bool = False) -> Consensus | None:
        """The replicas that look up together here; None: this one alone.

        Args:
            training: whether the tables are about to be updated.
        """
        return None

    def all_agree(self, ok: tf.Tensor) -> tf.Tensor:
        """Whether `ok`, a scalar bool, holds on all replicas of a step."""
        return ok

    @abc.abstractmethod
    def lookup(
        self,
        bags: Sequence[Bags],
        training: bool,
        dtype: tf.DType = tf.float32,
    ) -> tuple[list[tf.Tensor], Any]:
        """Looks up each feature's ids.

        Args:
            bags: each feature's bags.
            training: whether the tables are about to be updated.
            dtype: what the activations will be cast to.

        Returns:
            Each feature's activations, [count, dim] or in its bags' layout,
            float32 or, where that saves a cast, of the dtype; and what
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

    def _refuse_to_train(self, text: str) -> None:
        """Raises that tables are trained by replicas only.

        Args:
            text: what to say.

        Raises:
            RuntimeError: always, when executing eagerly. The gradients'
                functions are in a SavedModel too, which may not run them.
        """
        if tf.executing_eagerly():
            raise RuntimeError(text)
        tf.debugging.Assert(False, [text])

    def drain(self) -> None:
        """Applies the updates that pipelining has put off."""
        return

    def drop_pending(self) -> None:
        """Forgets the updates that pipelining has put off."""
        return

    @property
    def variables(self) -> list[Any]:
        """All variables, or what is like them: tables, their slots, step."""
        variables = [
            v for s in self.states.values() for v in s.variables.values()
        ]
        return [*variables, self.step]
