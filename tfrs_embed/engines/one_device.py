"""Tables on one device, looked up and updated row by row in TF ops."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs.tables import FeatureSpec, TableSpec
from tfrs_embed.engines.engine import Engine, Pipelined
from tfrs_embed.engines.norms import Norms
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.shard import DeferredUpdate, Shard, stored
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.update import (
    PARAMETERS,
    GradientContributions,
    scatter_update,
)
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.storage import allocation
from tfrs_embed.storage.initial_values import initial_blocks


class OneDeviceEngine(Engine, Pipelined):
    """Holds each table in one variable on one device."""

    def __init__(
        self,
        features: Sequence[FeatureSpec],
        optimizers: dict[str, TableOptimizer | None],
        options: EngineOptions,
    ) -> None:
        super().__init__(features, optimizers, options)
        self._shard = Shard(
            [s.spec for s in self.states.values()],
            optimizers,
            options.pipelined,
            options.device,
        )
        self._norms = Norms(optimizers)

    def build(self) -> None:
        self._shard.build(lambda table: table.vocabulary_size)
        for name, variables in self._shard.variables.items():
            self._fill(self.states[name].spec, variables[PARAMETERS])
            for key, variable in variables.items():
                self.states[name].add(key, variable)
        self._follow_step()

    def _fill(self, table: TableSpec, variable: Any) -> None:
        share = stored(
            table, table.vocabulary_size, self.optimizers[table.name]
        )
        with (
            tf.init_scope(),
            tf.device(self._shard.device),
            allocation.of_table(share, self._shard.device),
        ):
            for start, rows in initial_blocks(table):
                if rows.shape[0] == table.vocabulary_size:
                    variable.assign(rows)
                else:
                    end = start + rows.shape[0]
                    scatter_update(variable, tf.range(start, end), rows)

    @property
    def step(self) -> tf.Variable:
        return self._shard.step

    def lookup(
        self,
        bags: Sequence[BaggedIds],
        training: bool,
        dtype: tf.DType = tf.float32,
        begun: Any = None,
    ) -> tuple[list[tf.Tensor], Any]:
        if not training:
            self.apply_deferred()
        activations = self._shard.lookup(
            [f.table.name for f in self.features], bags, training, dtype
        )
        if training:
            # After the lookups, and not at all if the ids are bad.
            with tf.control_dependencies([b.ids for b in bags]):
                self.apply_deferred()
        return activations, bags

    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        contributions = {}
        for name, state in self.states.items():
            if self.optimizers[name] is None:
                continue
            mine = [
                i for i, f in enumerate(self.features) if f.table is state.spec
            ]
            contributions[name] = GradientContributions(
                [residuals[i] for i in mine], [gradients[i] for i in mine]
            )
        self._shard.update(
            contributions, [b.ids for b in residuals], self._norms.factors()
        )

    @property
    def deferred(self) -> DeferredUpdate | None:
        return self._shard.deferred

    def drop_deferred(self) -> None:
        self._shard.drop_deferred()

    def apply_deferred(self) -> None:
        self._shard.apply_deferred()
