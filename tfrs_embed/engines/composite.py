"""Several engines as one, each of which holds some of the tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs import FeatureSpec
from tfrs_embed.engines.engine import Engine
from tfrs_embed.engines.norms import require_together
from tfrs_embed.engines.tables.composite_step import CompositeStep
from tfrs_embed.engines.traffic import Traffic
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.checks import Consensus


class CompositeEngine(Engine):
    """Looks features up in, and trains, the tables of several engines.

    Args:
        features: the features to look up, in the order of each call.
        engines: the engines. Each table is held by one, which was made with
            those of the features that are looked up in its tables, in this
            order.

    Raises:
        ValueError: tables that share a `global_clipnorm` are of two engines.
    """

    def __init__(
        self, features: Sequence[FeatureSpec], engines: Sequence[Engine]
    ) -> None:
        require_together([e.optimizers for e in engines])
        optimizers = {k: o for e in engines for k, o in e.optimizers.items()}
        super().__init__(features, optimizers)
        for engine in engines:
            self.states.update(engine.states)
        self._engines = tuple(engines)
        able = [e for e in engines if e.can_decide]
        early = [e for e in able if e.begins_early]
        self._deciding = [*early, *able, *engines][0]
        for engine in engines:
            engine.decides = engine is self._deciding
        # The places of each engine's features.
        self._places = [
            [i for i, f in enumerate(features) if f.table.name in e.states]
            for e in engines
        ]
        self._step: CompositeStep | None = None

    @property
    def can_build(self) -> bool:
        """See the base class."""
        return all(e.can_build for e in self._engines)

    def observe_batch(self, bags: Sequence[BaggedIds | None]) -> None:
        """See the base class."""
        for engine, places in zip(self._engines, self._places, strict=True):
            engine.observe_batch([bags[i] for i in places])

    def require_all(self, given: Sequence[bool]) -> None:
        """See the base class."""
        for engine, places in zip(self._engines, self._places, strict=True):
            engine.require_all([given[i] for i in places])

    def raise_limits(self, bags: Sequence[BaggedIds]) -> None:
        """See the base class."""
        for engine, places in zip(self._engines, self._places, strict=True):
            engine.raise_limits([bags[i] for i in places])

    def build(self) -> None:
        """See the base class."""
        if self._step is not None:
            return
        for engine in self._engines:
            engine.build()
        steps = [e.step for e in self._engines]
        self._step = CompositeStep(
            steps, steps[0]._distribute_strategy, self.drop_deferred
        )
        self._follow_step()

    @property
    def step(self) -> Any:
        """See the base class."""
        return self._step

    @property
    def has_whole_tables(self) -> bool:
        """See the base class."""
        return all(e.has_whole_tables for e in self._engines)

    @property
    def gives_rows(self) -> bool:
        """See the base class."""
        return any(e.gives_rows for e in self._engines)

    @property
    def local_replicas(self) -> int:
        """See the base class."""
        return max(e.local_replicas for e in self._engines)

    def consensus(self, training: bool = False) -> Consensus | None:
        """See the base class."""
        return self._deciding.consensus(training)

    def all_agree(self, ok: tf.Tensor) -> tf.Tensor:
        """See the base class."""
        return self._deciding.all_agree(ok)

    def lookup(
        self,
        bags: Sequence[BaggedIds],
        training: bool,
        dtype: tf.DType = tf.float32,
    ) -> tuple[list[tf.Tensor], Any]:
        """See the base class."""
        activations: list[Any] = [None] * len(bags)
        residuals = []
        for engine, places in zip(self._engines, self._places, strict=True):
            found, residual = engine.lookup(
                [bags[i] for i in places], training, dtype
            )
            for i, vectors in zip(places, found, strict=True):
                activations[i] = vectors
            residuals.append(residual)
        return activations, (residuals, list(activations))

    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        """See the base class.

        Raises:
            RuntimeError: the lookup was not made where the tables are trained.
        """
        by_engine, activations = residuals
        # No table is trained in a step that finds no room for another's keys.
        with tf.control_dependencies(activations if self.gives_rows else []):
            for engine, places, residual in zip(
                self._engines, self._places, by_engine, strict=True
            ):
                engine.apply_gradients(residual, [gradients[i] for i in places])

    def apply_deferred(self) -> None:
        """See the base class."""
        for engine in self._engines:
            engine.apply_deferred()

    @property
    def deferred(self) -> list[Any]:
        """See the base class."""
        return tf.nest.flatten([e.deferred or [] for e in self._engines])

    def traffic(self) -> list[Traffic]:
        """See the base class; the sums of all engines."""
        counted = [t for t in (e.traffic() for e in self._engines) if t]
        return [
            Traffic(
                *map(sum, zip(*map(dataclasses.astuple, each), strict=True))
            )
            for each in zip(*counted, strict=True)
        ]

    def drop_deferred(self) -> None:
        """See the base class."""
        for engine in self._engines:
            engine.drop_deferred()
