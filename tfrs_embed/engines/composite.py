"""Several engines as one; each holds some of the tables."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfrs_embed.distribution.traffic import Traffic
from tfrs_embed.engines.engine import (
    Engine,
    FixedBatches,
    LookupCall,
)
from tfrs_embed.engines.norms import require_together
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.storage.composite_step import CompositeStep

if TYPE_CHECKING:
    from tfrs_embed.engines.joint_decisions import JointDecisions


class CompositeEngine(Engine, FixedBatches):
    """Looks features up in the tables of several engines, and trains these.

    Raises:
        ValueError: tables that share a `global_clipnorm` are of two engines.
    """

    def __init__(
        self, options: EngineOptions, engines: Sequence[Engine]
    ) -> None:
        require_together([e.optimizers for e in engines])
        super().__init__(options)
        for engine in engines:
            self.states.update(engine.states)
        self._engines = tuple(engines)
        # The indices of each engine's features.
        self._places = [
            [i for i, f in enumerate(self.features) if f.table.name in e.states]
            for e in engines
        ]
        # The engines that take batches of one size, with their features.
        self._fixed = [
            (engine, places)
            for engine, places in zip(engines, self._places, strict=True)
            if isinstance(engine, FixedBatches)
        ]

    @property
    def can_build(self) -> bool:
        return all(e.can_build for e, _ in self._fixed)

    def observe_batch(self, bags: Sequence[BaggedIds | None]) -> None:
        for engine, places in self._fixed:
            engine.observe_batch([bags[i] for i in places])

    def require_all(self, given: Sequence[bool]) -> None:
        for engine, places in self._fixed:
            engine.require_all([given[i] for i in places])

    def raise_limits(self, bags: Sequence[BaggedIds]) -> None:
        for engine, places in self._fixed:
            engine.raise_limits([bags[i] for i in places])

    def _build(self) -> CompositeStep:
        for engine in self._engines:
            engine.build()
        steps = [e.step for e in self._engines]
        return CompositeStep(steps, steps[0]._distribute_strategy)

    @property
    def together(self) -> JointDecisions | None:
        able = [e.together for e in self._engines if e.together is not None]
        # All engines of a strategy decide with the same collective.
        return max(able, key=lambda e: e.begins_early, default=None)

    def lookup(self, call: LookupCall) -> tuple[list[tf.Tensor], Any]:
        activations: list[Any] = [None] * len(call.bags)
        residuals = []
        deciding = self.together
        for engine, places in zip(self._engines, self._places, strict=True):
            mine = call._replace(bags=[call.bags[i] for i in places])
            if engine.together is not deciding:
                mine = mine._replace(begun=None)
            found, residual = engine.lookup(mine)
            for i, vectors in zip(places, found, strict=True):
                activations[i] = vectors
            residuals.append(residual)
        return activations, (residuals, list(activations))

    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        by_engine, activations = residuals
        # No table is trained if there is no room for another's keys.
        with tf.control_dependencies(activations if self.gives_rows else []):
            for engine, places, residual in zip(
                self._engines, self._places, by_engine, strict=True
            ):
                engine.apply_gradients(residual, [gradients[i] for i in places])

    def gradient_squares(self) -> tf.Tensor:
        return tf.add_n([e.gradient_squares() for e in self._engines])

    def traffic(self) -> list[Traffic]:
        counted = [t for t in (e.traffic() for e in self._engines) if t]
        return [
            Traffic(
                *map(sum, zip(*map(dataclasses.astuple, each), strict=True))
            )
            for each in zip(*counted, strict=True)
        ]
