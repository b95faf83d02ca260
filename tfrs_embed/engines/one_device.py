"""Tables on one device, without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.engines.engine import Engine, LookupCall
from tfrs_embed.engines.norms import norm_factors
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.shard import Shard
from tfrs_embed.ops.update import (
    PARAMETERS,
    GradientContributions,
    add_bags,
)
from tfrs_embed.storage.initial_values import initial_blocks
from tfrs_embed.storage.moments import Moments
from tfrs_embed.storage.sharded import Part


class OneDeviceEngine(Engine):
    """Holds each table in one variable on one device."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._shard = Shard(self.tables, self.optimizers, options.device)
        self._moments = Moments()
        for state in self.states.values():
            state.moments = self._moments

    def build(self) -> None:
        self._shard.build(lambda table: table.vocabulary_size)
        self._moments.add(self._shard.store)
        for name, state in self.states.items():
            whole = Part(range(state.spec.vocabulary_size))
            state.sources = [(whole, self._shard.store)]
            variables = self._shard.store.variables(name)
            self._fill(state.spec, variables[PARAMETERS])
            for key, variable in variables.items():
                state.add(key, variable)
        self._follow_step()

    def _fill(self, table: TableSpec, variable: Any) -> None:
        whole = Part(range(table.vocabulary_size))
        with tf.init_scope(), tf.device(self._shard.device):
            for start, rows in initial_blocks(table):
                whole.write(variable, start, rows)

    @property
    def step(self) -> tf.Variable:
        return self._shard.step

    def lookup(self, call: LookupCall) -> tuple[list[tf.Tensor], Any]:
        names = [f.table.name for f in self.features]
        activations = self._shard.store.lookup(
            names, call.bags, call.training, call.dtype
        )
        return activations, call.bags

    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        contributions: dict[str, GradientContributions] = {}
        for f, bags, gradient in zip(
            self.features, residuals, gradients, strict=True
        ):
            add_bags(contributions, f.table.name, bags, gradient)
        self._shard.update(
            contributions,
            [b.ids for b in residuals],
            norm_factors(self.optimizers),
        )
