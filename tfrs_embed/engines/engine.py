"""The interface of engines."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.distribution.traffic import Traffic
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.shard import distinct
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.checks import Consensus
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.storage.state import TableState


class Engine(abc.ABC):
    """Looks ids up in tables, and trains the tables.

    Layers make an engine when they are made, and build it when they know what
    `build` needs, under their strategy. `lookup` and `apply_gradients` are for
    built engines.

    Args:
        features: the features to look up, in the order of each call.
        optimizers: each table's optimizer by the table's name, or None for a
            table that is not trained.
        options: the other arguments.

    Attributes:
        features: the features, in the order of each call.
        optimizers: each table's optimizer or None, by the table's name.
        states: each table's state by the table's name. Building the engine
            adds the variables, each of which is a `tf.Variable` or, where the
            table is in parts, has those members of one that see it whole.
    """

    _State: type[TableState] = TableState

    def __init__(
        self,
        features: Sequence[FeatureSpec],
        optimizers: dict[str, TableOptimizer | None],
        options: EngineOptions,
    ) -> None:
        self._name = options.name
        self._strategy = options.strategy
        self._pipelined = options.pipelined
        self.features = tuple(features)
        self.optimizers = optimizers
        self.states: dict[str, TableState] = {}
        for feature in features:
            table = feature.table
            if table.name not in self.states:
                self.states[table.name] = self._State(
                    table, optimizers[table.name]
                )

    @abc.abstractmethod
    def build(self) -> None:
        """Creates the variables.

        Where a strategy's replicas build a layer, each of them calls this: the
        first call creates the variables, the others do nothing.

        Raises:
            ValueError: a batch has to be seen first; see `FixedBatches`.
            RuntimeError: other workers build other tables.
        """

    def _follow_step(self) -> None:
        """Lets the optimizers' learning rates follow this engine's step."""
        for optimizer in distinct(self.optimizers):
            optimizer.follow(lambda: self.step)

    @property
    @abc.abstractmethod
    def step(self) -> Any:
        """The number of updates made, a scalar int64.

        A variable, or an object that has a variable's `numpy`, `assign` and
        conversion to a tensor; None before `build`.
        """

    @property
    def has_whole_tables(self) -> bool:
        """Whether each table is one `tf.Variable`, as Keras can load them."""
        return True

    @property
    def gives_rows(self) -> bool:
        """Whether a lookup on a gradient tape is a training step.

        One that gives rows to keys has to know that before their gradients.
        """
        return False

    @property
    def together(self) -> Together | None:
        """Who decides with the other replicas; None: there are no others."""
        return None

    @abc.abstractmethod
    def lookup(
        self,
        bags: Sequence[BaggedIds],
        training: bool,
        dtype: tf.DType = tf.float32,
        begun: Any = None,
    ) -> tuple[list[tf.Tensor], Any]:
        """Looks up each feature's ids.

        Args:
            bags: each feature's bags, in the order of `features`.
            training: whether the tables are about to be updated.
            dtype: the dtype that the activations will be cast to.
            begun: what the consensus on these bags has begun of the lookup;
                None: nothing.

        Returns:
            Each feature's activations, [count, dim] or in its bags' layout,
            float32 or, where that saves a cast, of the dtype; and the
            residuals, whatever `apply_gradients` needs of the lookup.

        Raises:
            ValueError: the batch is larger than the tables were made for.
            NotImplementedError: tables can't be read where this is.
        """

    @abc.abstractmethod
    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        """Updates the tables and the step, or defers that; see `Pipelined`.

        Args:
            residuals: the residuals that `lookup` returned.
            gradients: each feature's gradient, [count, dim] float32.

        Raises:
            RuntimeError: the lookup was not made where the tables are trained.
        """

    def traffic(self) -> list[Traffic]:
        """The communication of each local replica since `build`.

        Empty if this engine counts none.
        """
        return []


class Pipelined(abc.ABC):
    """An engine whose updates can be deferred to the next training step."""

    @property
    @abc.abstractmethod
    def deferred(self) -> Any:
        """The variables of deferred updates, once built, to be tracked.

        Returns:
            A `DeferredUpdate`, or a list of them; None or an empty list: no
            updates are deferred.
        """

    @abc.abstractmethod
    def apply_deferred(self) -> None:
        """Applies the updates that pipelining has deferred.

        Inside a replica, those of that replica; elsewhere, those of all
        replicas of this process.
        """

    @abc.abstractmethod
    def drop_deferred(self) -> None:
        """Drops the updates that pipelining has deferred."""


class FixedBatches(abc.ABC):
    """An engine of hardware that takes batches of one size."""

    @property
    @abc.abstractmethod
    def can_build(self) -> bool:
        """Whether all is known that `build` needs; see `observe_batch`."""

    @abc.abstractmethod
    def observe_batch(self, bags: Sequence[BaggedIds | None]) -> None:
        """Takes from a call's bags what `build` needs to know.

        Args:
            bags: each feature's bags, None if the call leaves it out.
        """

    @abc.abstractmethod
    def require_all(self, given: Sequence[bool]) -> None:
        """Requires a call's features to be all of them, if the engine does.

        Args:
            given: which of the features the call has ids for.

        Raises:
            NotImplementedError: it does, and some are left out.
        """

    @abc.abstractmethod
    def raise_limits(self, bags: Sequence[BaggedIds]) -> None:
        """Raises the limits of hardware that has them to what a batch needs.

        Args:
            bags: each feature's bags in a global batch, executing eagerly.
        """


class Together(abc.ABC):
    """An engine of several replicas, which look up and decide together.

    Attributes:
        begins_early: whether the consensus on ids finds what their lookup needs
            of the other replicas too.
        local_replicas: the number of replicas that train the tables in this
            process.
    """

    begins_early = False
    local_replicas: int

    @abc.abstractmethod
    def consensus(self, training: bool = False) -> Consensus | None:
        """The replicas that look up together, and decide about ids together.

        Args:
            training: whether the tables are about to be updated.

        Returns:
            The replicas; None: the one that asks looks up alone.
        """

    @abc.abstractmethod
    def all_agree(self, ok: tf.Tensor) -> tf.Tensor:
        """Whether a condition holds on all replicas of a step.

        Args:
            ok: a scalar bool, on this replica.

        Returns:
            A scalar bool, the same on all replicas.
        """


def refuse_to_train(text: str) -> None:
    """Raises that tables are trained by replicas only.

    Args:
        text: what to say.

    Raises:
        RuntimeError: always, when executing eagerly. The gradients' functions
            are in a SavedModel too, which may not run them.
    """
    if tf.executing_eagerly():
        raise RuntimeError(text)
    tf.debugging.Assert(False, [text])
