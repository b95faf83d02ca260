"""The interface of engines."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs import FeatureSpec
from tfrs_embed.engines.shard import distinct
from tfrs_embed.engines.tables.state import TableState
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.checks import Consensus
from tfrs_embed.optimizers.rules import TableOptimizer


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
    def can_build(self) -> bool:
        """Whether all is known that `build` needs."""
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

    def follow_step(self) -> None:
        """Lets the optimizers' learning rates follow this engine's step."""
        for optimizer in distinct(self.optimizers):
            optimizer.follow(lambda: self.step)

    @property
    @abc.abstractmethod
    def step(self) -> Any:
        """The number of updates made: a scalar int64 variable, or like one."""

    @property
    def has_whole_tables(self) -> bool:
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
        bags: Sequence[BaggedIds],
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
        """Applies the updates that pipelining has deferred."""
        return

    def drop_pending(self) -> None:
        """Forgets the updates that pipelining has deferred."""
        return

    @property
    def variables(self) -> list[Any]:
        """All variables, or what is like them: tables, their slots, step."""
        variables = [
            v for s in self.states.values() for v in s.variables.values()
        ]
        return [*variables, self.step]
