"""The base of engines whose tables are held by a strategy's replicas."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.checkpoint.change_tracking import Moments
from tfrs_embed.checkpoint.rows import RowNumbers
from tfrs_embed.compat import graphs
from tfrs_embed.compat.private_tensorflow import save_context
from tfrs_embed.compat.unmirrored import make_variable
from tfrs_embed.configs.tables import FeatureSpec, TableSpec
from tfrs_embed.distribution import replicas
from tfrs_embed.distribution.traffic import Traffic
from tfrs_embed.distribution.wire import Wire
from tfrs_embed.engines.engine import (
    Engine,
    LookupCall,
    refuse_to_train,
)
from tfrs_embed.engines.joint_decisions import UPDATE, JointDecisions
from tfrs_embed.engines.norms import norm_factors
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.shard import Shard
from tfrs_embed.ops import lookup as lookup_ops
from tfrs_embed.ops import rounding
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.rounding import Rounding, widen
from tfrs_embed.ops.update import PARAMETERS, GradientContributions
from tfrs_embed.storage.composite_step import CompositeStep
from tfrs_embed.storage.initial_values import initial_blocks
from tfrs_embed.storage.sharded import Part, ShardedVariable
from tfrs_embed.storage.table_state import TableState


class Residuals(NamedTuple):
    """The results of a replica's lookup that its update needs.

    `kept` is the engine's own. The tensors `after` don't exist if the ids are
    bad.
    """

    replica: int
    bags: list[BaggedIds]
    kept: Any
    after: list[tf.Tensor]


class CollectiveEngine(Engine):
    """Keeps a shard of the tables on each replica of a strategy.

    Each replica looks up its own part of the global batch; all must call
    together. Gradients are summed over the replicas.

    Raises:
        NotImplementedError: the strategy's collectives can't be used.
    """

    # Whether each replica has the whole tables.
    _copied = False
    # The method that begins lookups for `JointDecisions`, if there is one.
    _begin_early: Any = None

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options, Moments())
        self._replicas = replicas.get_replicas(options.strategy)
        self._wire = Wire(options.communication_dtype)
        self._joint: Any = None
        self._traffic: list[tf.Variable] = []

    def _build(self) -> CompositeStep:
        """Creates the variables, on all workers in the same order."""
        ranks = self._replicas.ranks
        self._shards = [
            self._make_shard(rank, device)
            for rank, device in zip(ranks, self._replicas.devices, strict=True)
        ]
        self._prepare()
        self._joint = JointDecisions(
            self._name,
            self._strategy,
            self._replicas,
            self._traffic,
            self._begin_early,
        )
        self._norms_channel = self._replicas.allocate(2)
        assert self._moments is not None
        for rank, shard in zip(ranks, self._shards, strict=True):
            shard.build(
                lambda t: max(len(p.rows) for p in self._parts(t).values()),
                functools.partial(_rounding, self._parts, rank),
                self._name,
                self._replicas.world,
            )
            self._moments.add(shard.store)
        step = CompositeStep([s.step for s in self._shards], self._strategy)
        stores = [shard.store for shard in self._shards]
        for state in self.states.values():
            if not self._expose_keys(state, stores, step):
                self._expose(state)
        for shard in self._shards:
            with tf.device(shard.device):
                counters = make_variable(tf.zeros([3], tf.int64), "traffic")
            self._traffic.append(counters)
        return step

    @abc.abstractmethod
    def _prepare(self) -> None:
        """Makes the exchanges between replicas, before there are tables."""

    def traffic(self) -> list[Traffic]:
        return [
            Traffic(*counters.numpy().tolist()) for counters in self._traffic
        ]

    def _make_shard(self, rank: int, device: str | None) -> Shard:
        """Makes the shard of one of this process's replicas."""
        return Shard(self.tables, self.optimizers, device, self._freezing)

    @abc.abstractmethod
    def _parts(self, table: TableSpec) -> dict[int, Part]:
        """The parts of a table, by the ranks of the shards that have them."""

    def _initial_blocks(
        self, table: TableSpec
    ) -> Iterable[tuple[int, tf.Tensor]]:
        """A table's initial rows; see `initial_values.initial_blocks`."""
        return initial_blocks(table)

    def _expose(self, state: TableState) -> None:
        """Adds a table's variables, as one for all shards, to its state.

        The shards get the table's initial rows before.
        """
        table, of_table = state.spec, self._parts(state.spec)
        # In the order of their columns, then of the local replicas.
        held = sorted(
            (
                (of_table[rank], shard.store)
                for rank, shard in zip(
                    self._replicas.ranks, self._shards, strict=True
                )
                if rank in of_table
            ),
            key=lambda each: each[0].columns or (0, 0),
        )
        exchange = None
        if self._replicas.workers > 1 and not self._copied:
            # One process doesn't need it.
            from tfrs_embed.storage.retrieval import Exchange

            exchange = Exchange(self._replicas, of_table, table.name)
        state.exchange = exchange
        state.sources = held[:1] if self._copied else held
        slots = state.rule_slots.items()
        rows = {name: slot.row(table.dim) for name, slot in slots}
        for key, row in {PARAMETERS: (table.dim,), **rows}.items():
            # One number for each row has no columns.
            parts = {r: p if row else Part(p.rows) for r, p in of_table.items()}
            variables = [
                (
                    part if row else Part(part.rows),
                    store.variables(table.name)[key],
                )
                for part, store in held
            ]
            variable = ShardedVariable(
                f"{table.name}/{key}",
                (table.vocabulary_size, *row),
                variables,
                self._strategy,
                tf.as_dtype(table.dtype if key == PARAMETERS else tf.float32),
                replicas=None if self._copied else self._replicas,
                parts=parts,
                copied=self._copied,
                on_write=self._on_write(table.name, key),
            )
            # All workers draw all blocks: the next table with this initializer
            # continues its random sequence.
            blocks = self._initial_blocks(table) if key == PARAMETERS else ()
            for start, block in blocks:
                variable.write_rows(range(start, start + block.shape[0]), block)
            state.add(key, variable)

    def _on_write(
        self, table: str, variable: str
    ) -> Callable[[RowNumbers, tf.Tensor], None] | None:
        """The `on_write` of the `ShardedVariable` of "parameters" or a slot."""
        return None

    @property
    def together(self) -> JointDecisions:
        return self._joint

    def lookup(self, call: LookupCall) -> tuple[list[tf.Tensor], Any]:
        replica = self._joint.running()
        if replica is not None:
            with self._replicas.counting(replica, self._traffic[replica]):
                return self._lookup(replica, call)
        if self._replicas.workers > 1 and not self._copied:
            workers = self._replicas.workers
            zeros = _refuse_outside(
                self._name, workers, self.features, call.bags
            )
            return zeros, None
        found = []
        for feature, b in zip(self.features, call.bags, strict=True):
            rows = widen(self._rows_outside(feature.table.name, b.ids))
            found.append(lookup_ops.combine(rows, None, b))
        return found, None

    @abc.abstractmethod
    def _lookup(
        self, replica: int, call: LookupCall
    ) -> tuple[list[tf.Tensor], Residuals]:
        """Looks up in a replica; see `lookup`."""

    @abc.abstractmethod
    def _rows_outside(self, table: str, ids: tf.Tensor) -> tf.Tensor:
        """Rows of a table, [n, dim], outside of any replica, in one process."""

    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        if residuals is None:
            refuse_to_train(
                f"{self._name} is trained by all replicas together: call it, "
                "and the gradient, inside strategy.run."
            )
            return
        self._joint.compare(UPDATE)
        # No table is trained if there is no room for another's keys.
        after = graphs.capture(residuals.after if self.gives_rows else [])
        replica, channel = residuals.replica, self._norms_channel
        counted = self._replicas.counting(replica, self._traffic[replica])
        # All replicas have all rows of copied tables; the maximum makes their
        # sums, which may differ in the last bits, equal.
        total = self._replicas.max if self._copied else self._replicas.sum
        with tf.control_dependencies(after), counted:
            self._shards[replica].update(
                self._contributions(residuals, gradients),
                residuals.after,
                norm_factors(
                    self.optimizers, lambda v: total(replica, v, channel)
                ),
                lambda v: total(replica, v, channel + 1),
            )

    @abc.abstractmethod
    def _contributions(
        self, residuals: Residuals, gradients: Sequence[tf.Tensor]
    ) -> dict[str, GradientContributions]:
        """Gathers a shard's gradients from all replicas, by table."""


def _rounding(
    parts: Callable[[TableSpec], dict[int, Part]], rank: int, table: TableSpec
) -> Rounding:
    """How a replica rounds the new rows of its part of a table."""
    part = parts(table)[rank]
    column, _ = part.columns or (0, 0)
    return rounding.of_part(table, part.rows.start, part.rows.step, column)


def _refuse_outside(
    name: str,
    workers: int,
    features: Sequence[FeatureSpec],
    bags: Sequence[BaggedIds],
) -> list[tf.Tensor]:
    """Fails when it runs: the tables are of several workers.

    Returns zeros to graphs; raises a RuntimeError in a SavedModel.
    """
    text = (
        f"{name} is sharded over {workers} workers and can only be called "
        "inside strategy.run."
    )
    if save_context.in_save_context():
        raise RuntimeError(f"{text} tfrs_embed.serving.export exports it.")
    remote = tf.debugging.Assert(False, [text])
    with tf.control_dependencies([remote] if remote else []):
        return [
            tf.zeros([b.count, f.table.dim])
            for f, b in zip(features, bags, strict=True)
        ]
