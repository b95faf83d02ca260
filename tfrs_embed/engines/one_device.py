"""Tables on one device, without communication."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.change_tracking import Moments
from tfrs_embed.compat.strategies import refuse_in_xla
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.engines.engine import Engine, LookupCall
from tfrs_embed.engines.norms import norm_factors
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.shard import Shard
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.update import (
    PARAMETERS,
    GradientContributions,
    add_bags,
)
from tfrs_embed.storage.initial_values import initial_blocks
from tfrs_embed.storage.row_store import HOST, IdsOfTables
from tfrs_embed.storage.sharded import Part


class OneDeviceEngine(Engine):
    """Holds each table on one device.

    Tables that are placed on the host are on a CPU, beside a GPU. Combined
    vectors and their gradients are all that the GPU sends and gets.
    """

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options, Moments())
        self._on_host = any(t.on_host for t in self.tables)
        device = HOST if self._on_host else options.device
        self._shard = Shard(
            self.tables, self.optimizers, device, self._freezing
        )
        self._shards = [self._shard]

    def _build(self) -> tf.Variable:
        self._shard.build(lambda t: t.vocabulary_size, layer=self._name)
        store = self._shard.store
        assert self._moments is not None
        self._moments.add(store)
        for name, state in self.states.items():
            if self._expose_keys(state, [store], self._shard.step):
                continue
            whole = Part(range(state.spec.vocabulary_size))
            state.sources = [(whole, store)]
            variables = store.variables(name)
            self._fill(state.spec, variables[PARAMETERS])
            for key, variable in variables.items():
                state.add(key, variable)
        return self._shard.step

    def _fill(self, table: TableSpec, variable: Any) -> None:
        whole = Part(range(table.vocabulary_size))
        with tf.device(self._shard.device):
            for start, rows in initial_blocks(table):
                whole.write(variable, range(start, start + rows.shape[0]), rows)

    def lookup(self, call: LookupCall) -> tuple[list[tf.Tensor], Any]:
        if self._on_host:
            refuse_in_xla("Tables in the host's memory")
        with self._scope():
            names = [f.table.name for f in self.features]
            ids = [
                IdsOfTables([name], b.ids)
                for name, b in zip(names, call.bags, strict=True)
            ]
            store, training = self._shard.store, call.training
            located = store.locate(ids, training, self.step)
            bags = _with_rows(call.bags, located.rows)
            found = store.lookup(names, bags, training, call.dtype)
            return store.check(located, found, bags), (call.bags, located)

    def _scope(self) -> Any:
        """Places operations on the host, if tables are there."""
        return tf.device(HOST) if self._on_host else contextlib.nullcontext()

    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        bags, located = residuals
        contributions: dict[str, GradientContributions] = {}
        with self._scope():
            rows = self._shard.store.commit(located, gradients)
            for f, b, gradient in zip(
                self.features, _with_rows(bags, rows), gradients, strict=True
            ):
                add_bags(contributions, f.table.name, b, gradient)
            self._shard.update(
                contributions, rows, norm_factors(self.optimizers)
            )


def _with_rows(
    bags: Sequence[BaggedIds], rows: Sequence[tf.Tensor]
) -> list[BaggedIds]:
    """Returns bags of rows instead of ids."""
    return [b._replace(ids=r) for b, r in zip(bags, rows, strict=True)]
