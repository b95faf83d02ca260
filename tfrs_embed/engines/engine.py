"""The interface of engines."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import tensorflow as tf

from tfrs_embed.checkpoint.change_tracking import Moments
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.distribution.traffic import Traffic
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.shard import Shard, distinct
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.storage.table_state import Freezing, TableState

if TYPE_CHECKING:
    from tfrs_embed.engines.joint_decisions import JointDecisions


class LookupCall(NamedTuple):
    """The arguments of a lookup.

    Attributes:
        bags: each feature's bags, in the order of the engine's features.
        training: whether the tables are about to be updated.
        dtype: the dtype that the activations will be cast to.
        begun: what `EarlyLookup.finish` returned for this lookup; None: it has
            not begun.
    """

    bags: Sequence[BaggedIds]
    training: bool
    dtype: tf.DType
    begun: Any = None


class Engine(abc.ABC):
    """Looks ids up in tables, and trains the tables.

    Layers construct an engine, and call `build` under their strategy as soon as
    it has all it needs. `lookup` and `apply_gradients` need a built engine.

    Attributes:
        features: the features, in the order of each call's bags.
        tables: their tables, in the order of their first features.
        optimizers: each table's optimizer by the table's name; None: the table
            is not trained.
        states: each table's state by the table's name. `build` adds the
            variables: `tf.Variable`s, or objects like one for tables in parts.
    """

    def __init__(
        self, options: EngineOptions, moments: Moments | None = None
    ) -> None:
        """`moments` numbers changes of tables; None: they aren't tracked."""
        self._moments = moments
        self._name = options.name
        self._strategy = options.strategy
        self._pipelined = options.pipelined
        self._step: Any = None
        # This process's shards; a TPU's tables have none.
        self._shards: list[Shard] = []
        self.features = tuple(options.features)
        tables = {f.table.name: f.table for f in self.features}
        self.tables = tuple(tables.values())
        self.optimizers = {name: options.optimizers[name] for name in tables}
        self.states = {
            name: _make_state(
                table, self.optimizers[name], options.strategy, moments
            )
            for name, table in tables.items()
        }
        for name, optimizer in self.optimizers.items():
            steps = optimizer and optimizer.options.accumulation
            if steps and tables[name].keys is not None:
                raise ValueError(
                    f"Table '{name}' has DynamicKeys: its rows may have other "
                    f"keys after gradient_accumulation_steps={steps} steps. "
                    "Leave the setting out, and make larger batches."
                )
        self._freezing = Freezing()
        if moments is not None:
            for state in self.states.values():
                state.freezing = self._freezing

    def build(self) -> None:
        """Creates the variables; a second call does nothing.

        Raises:
            ValueError: a batch has to be seen first; see `FixedBatches`.
            RuntimeError: other workers build other tables.
        """
        if self._step is not None:
            return
        with tf.init_scope():
            self._step = self._build()
        for optimizer in distinct(self.optimizers):
            optimizer.follow(lambda: self.step)

    @abc.abstractmethod
    def _build(self) -> Any:
        """Creates the variables; returns the step."""

    def _expose_keys(
        self, state: TableState, stores: Sequence[Any], step: Any
    ) -> bool:
        """Adds its keys' variables to a table's state; False: it has no keys.

        `stores` are the stores of this process, `step` is the number of
        updates made.
        """
        if state.spec.keys is None:
            return False
        dynamic: Any = state
        dynamic.expose(stores, step)
        return True

    @property
    def step(self) -> Any:
        """The number of updates made, a scalar int64; None before `build`.

        A variable, or an object with a variable's `numpy` and `assign`.
        """
        return self._step

    @property
    def gives_rows(self) -> bool:
        """Whether training lookups give rows to new keys."""
        return any(table.keys is not None for table in self.tables)

    @property
    def together(self) -> JointDecisions | None:
        """Decides with the other replicas; None: there are none.

        It exists once the engine is built.
        """
        return None

    @abc.abstractmethod
    def lookup(self, call: LookupCall) -> tuple[list[tf.Tensor], Any]:
        """Looks up each feature's ids.

        Returns:
            Each feature's activations, [count, dim] or in its bags' layout,
            float32 or, where that saves a cast, of the call's dtype; and the
            residuals, which `apply_gradients` takes.

        Raises:
            ValueError: the batch is larger than the tables were made for.
            NotImplementedError: tables can't be read in this context.
        """

    @abc.abstractmethod
    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        """Updates the tables and the step.

        Args:
            residuals: the residuals that `lookup` returned.
            gradients: each feature's gradient, [count, dim] float32.

        Raises:
            RuntimeError: the lookup was not made where the tables are trained.
        """

    def gradient_squares(self) -> tf.Tensor:
        """Returns the sum of the squares of the last update's gradient.

        A scalar float64; NaN if that update didn't measure it, as updates do
        from the first call on. See `TableHolder.gradient_norm` for errors.
        """
        if not self._shards:
            raise NotImplementedError(
                f"{self._name}: gradient_norm of tables on TPUs isn't known to "
                "TensorFlow."
            )
        if self._shards[0].squares is None:
            self._measure()
        replica = self.together.running() if self.together else None
        shard = self._shards[replica or 0]
        square, until = tf.unstack(tf.convert_to_tensor(shard.squares))
        step = tf.cast(tf.convert_to_tensor(shard.step), tf.float64)
        return tf.where(tf.equal(until, step), square, float("nan"))

    def _measure(self) -> None:
        if not tf.executing_eagerly():
            raise RuntimeError(
                f"{self._name}: gradient_norm is called for the first time in "
                "a function that is being traced, after updates that don't "
                "measure it. Call it once before, eagerly."
            )
        # Imported here: few programs read it.
        from tfrs_embed.distribution import handshake

        handshake.compare_actions(
            self._strategy, f"the first gradient_norm of {self._name}"
        )
        if self._freezing.is_traced:
            warnings.warn(
                f"{self._name}: functions that were traced before don't "
                "measure gradient_norm, which is NaN after their updates. Call "
                "model.compile again, or trace them again.",
                stacklevel=4,
            )
        for shard in self._shards:
            shard.measure()

    def traffic(self) -> list[Traffic]:
        """The communication of each local replica since `build`, if counted."""
        return []


class FixedBatches(abc.ABC):
    """An engine of hardware that takes batches of one size."""

    @property
    @abc.abstractmethod
    def can_build(self) -> bool:
        """Whether all is known that `build` needs; see `observe_batch`."""

    @abc.abstractmethod
    def observe_batch(self, bags: Sequence[BaggedIds | None]) -> None:
        """Reads what `build` needs from the features' bags; None: left out."""

    @abc.abstractmethod
    def require_all(self, given: Sequence[bool]) -> None:
        """Raises a NotImplementedError if features that it needs are left out.

        Args:
            given: for each feature, whether the call has ids for it.
        """

    @abc.abstractmethod
    def raise_limits(self, bags: Sequence[BaggedIds]) -> None:
        """Raises the hardware's limits to what a global batch's bags need."""


def refuse_to_train(text: str) -> None:
    """Raises a RuntimeError; in a graph, when it runs.

    SavedModels have the gradients' functions too, and may never run them.
    """
    if tf.executing_eagerly():
        raise RuntimeError(text)
    tf.debugging.Assert(False, [text])


def _make_state(
    spec: TableSpec,
    optimizer: TableOptimizer | None,
    strategy: tf.distribute.Strategy,
    moments: Moments | None,
) -> TableState:
    """Makes the state of a table.

    Raises:
        ValueError: the initializer can't make the row of a single key.
    """
    if spec.keys is None:
        return TableState(spec, optimizer, strategy, moments)
    # Imported here, as few tables have keys.
    from tfrs_embed.storage import initial_key_values
    from tfrs_embed.storage.dynamic_table import DynamicTable

    initial_key_values.maker(spec)  # For its errors, before it is built.
    return DynamicTable(spec, optimizer, strategy, moments)
