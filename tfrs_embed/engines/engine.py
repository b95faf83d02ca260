"""The interface of engines."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs import FeatureSpec
from tfrs_embed.engines.shard import distinct
from tfrs_embed.engines.tables.state import TableState
from tfrs_embed.engines.traffic import Traffic
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.checks import Consensus
from tfrs_embed.optimizers.rules import TableOptimizer


class Engine(abc.ABC):
    """Looks ids up in tables, and trains the tables.

    Layers make an engine when they are made, and build it when they know what
    `build` needs, under their strategy. `lookup` and `apply_gradients` are for
    built engines.

    Args:
        features: the features to look up, in the order of each call.
        optimizers: each table's optimizer by the table's name, or None for a
            table that is not trained.

    Attributes:
        features: the features, in the order of each call.
        optimizers: each table's optimizer or None, by the table's name.
        decides: whether this engine runs the id check of the composite, the
            replicas' consensus on a call's ids.
        states: each table's state by the table's name. Building the engine
            adds the variables, each of which is a `tf.Variable` or, where the
            table is in parts, has those members of one that see it whole.
    """

    def __init__(
        self,
        features: Sequence[FeatureSpec],
        optimizers: dict[str, TableOptimizer | None],
    ) -> None:
        self.features = tuple(features)
        self.optimizers = optimizers
        self.decides = True
        self.states: dict[str, TableState] = {}
        for feature in features:
            table = feature.table
            if table.name not in self.states:
                self.states[table.name] = TableState(
                    table, optimizers[table.name]
                )

    @abc.abstractmethod
    def build(self) -> None:
        """Creates the variables.

        Where a strategy's replicas build a layer, each of them calls this: the
        first call creates the variables, the others do nothing.

        Raises:
            ValueError: `can_build` is False.
            RuntimeError: other workers build other tables.
        """

    @property
    def can_build(self) -> bool:
        """Whether all is known that `build` needs; see `observe_batch`."""
        return True

    def observe_batch(self, bags: Sequence[BaggedIds | None]) -> None:
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

    def raise_limits(self, bags: Sequence[BaggedIds]) -> None:
        """Raises the limits of hardware that has them to what a batch needs.

        Args:
            bags: each feature's bags in a global batch, executing eagerly.
        """
        return

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
    def local_replicas(self) -> int:
        """The number of replicas that train the tables in this process."""
        return 1

    def consensus(self, training: bool = False) -> Consensus | None:
        """The replicas that look up together, which decide about ids together.

        Args:
            training: whether the tables are about to be updated.

        Returns:
            The replicas; None: the one that asks looks up alone.
        """
        return None

    @property
    def can_decide(self) -> bool:
        """Whether it has several replicas, which decide together."""
        return False

    @property
    def begins_early(self) -> bool:
        """Whether the consensus on its ids finds what its lookups need too."""
        return False

    def all_agree(self, ok: tf.Tensor) -> tf.Tensor:
        """Whether a condition holds on all replicas of a step.

        Args:
            ok: a scalar bool, on this replica.

        Returns:
            A scalar bool, the same on all replicas.
        """
        return ok

    @abc.abstractmethod
    def lookup(
        self,
        bags: Sequence[BaggedIds],
        training: bool,
        dtype: tf.DType = tf.float32,
    ) -> tuple[list[tf.Tensor], Any]:
        """Looks up each feature's ids.

        Args:
            bags: each feature's bags, in the order of `features`.
            training: whether the tables are about to be updated.
            dtype: the dtype that the activations will be cast to.

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
        """Updates the tables and the step, or defers that; see `deferred`.

        Args:
            residuals: the residuals that `lookup` returned.
            gradients: each feature's gradient, [count, dim] float32.

        Raises:
            RuntimeError: the lookup was not made where the tables are trained.
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

    @property
    def deferred(self) -> Any:
        """The variables of updates that pipelining defers, once built.

        Returns:
            A `DeferredUpdate`, or a list of them, for TensorFlow to track;
            None: this engine's updates are never deferred.
        """
        return None

    def apply_deferred(self) -> None:
        """Applies the updates that pipelining has deferred.

        Inside a replica, those of that replica; elsewhere, those of all
        replicas of this process.
        """
        return

    def drop_deferred(self) -> None:
        """Drops the updates that pipelining has deferred."""
        return

    @property
    def gives_rows(self) -> bool:
        """Whether a lookup on a gradient tape is a training step.

        One that gives rows to keys has to know that before their gradients.
        """
        return False

    @property
    def key_capacity(self) -> int | None:
        """The number of keys that a shard has rows for.

        None: an id is the number of its row.
        """
        return None

    def local_key_counts(self) -> dict[int, int]:
        """The number of keys with rows, by the ranks of this process's shards.

        Raises:
            NotImplementedError: an id is the number of its row.
        """
        raise NotImplementedError

    def key_counts(self) -> list[int]:
        """The number of keys with rows, of each shard.

        With several workers it is a collective: all must ask.

        Raises:
            NotImplementedError: an id is the number of its row.
        """
        raise NotImplementedError

    def traffic(self) -> list[Traffic]:
        """The communication of each local replica since `build`.

        Empty if this engine counts none.
        """
        return []

    @property
    def variables(self) -> list[Any]:
        """All tables' variables and slots, then the step; see `states`."""
        variables = [
            v for s in self.states.values() for v in s.variables.values()
        ]
        return [*variables, self.step]
