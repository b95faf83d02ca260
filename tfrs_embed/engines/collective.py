"""The base of engines whose tables are held by a strategy's replicas."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.checkpoint.change_tracking import Moments
from tfrs_embed.checkpoint.rows import RowNumbers
from tfrs_embed.compat import graphs
from tfrs_embed.compat.private_tensorflow import save_context
from tfrs_embed.compat.unmirrored import make_variable
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.distribution import handshake, replicas
from tfrs_embed.distribution.consensus import ReplicaConsensus
from tfrs_embed.distribution.traffic import Traffic
from tfrs_embed.distribution.wire import Wire
from tfrs_embed.engines.engine import (
    Engine,
    JointEngine,
    LookupCall,
    refuse_to_train,
)
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

_LOOKUP = "a lookup"
_TRAINING_LOOKUP = "a lookup for training"
_UPDATE = "an update"
NEW_KEYS = "the insertion of new keys"


class Residuals(NamedTuple):
    """The results of a replica's lookup that its update needs.

    `kept` is the engine's own. The tensors `after` don't exist if the ids are
    bad.
    """

    replica: int
    bags: list[BaggedIds]
    kept: Any
    after: list[tf.Tensor]


class CollectiveEngine(Engine, JointEngine):
    """Keeps a shard of the tables on each replica of a strategy.

    Each replica looks up its own part of the global batch; all must call
    together. Gradients are summed over the replicas.

    Raises:
        NotImplementedError: the strategy's collectives can't be used.
    """

    # Whether each replica has the whole tables.
    _copied = False

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options, Moments())
        self._replicas = replicas.get_replicas(options.strategy)
        self._wire = Wire(options.communication_dtype)
        self._step: Any = None
        # Actions that workers have compared.
        self._compared: set[str] = set()
        self._traffic: list[tf.Variable] = []

    def build(self) -> None:
        if self._step is not None:
            return
        with tf.init_scope():
            self._shards = [
                self._make_shard(rank, device)
                for rank, device in zip(
                    self._replicas.ranks, self._replicas.devices, strict=True
                )
            ]
            self._build()

    def _build(self) -> None:
        """Creates the variables, on all workers in the same order."""
        self._number = self._replicas.count("layers")
        self._norms_channel = self._replicas.allocate(2)
        assert self._moments is not None
        for rank, shard in zip(self._replicas.ranks, self._shards, strict=True):
            shard.build(
                self._rows_on_shard,
                functools.partial(self._rounding, rank),
                self._name,
                self._replicas.world,
            )
            self._moments.add(shard.store)
        steps = [shard.step for shard in self._shards]
        step = CompositeStep(steps, self._strategy)
        stores = [shard.store for shard in self._shards]
        for state in self.states.values():
            if not self._expose_keys(state, stores, step):
                self._expose(state)
        # The tables are there: another call of build does nothing.
        self._step = step
        self._follow_step()
        for shard in self._shards:
            with tf.device(shard.device):
                counters = make_variable(tf.zeros([3], tf.int64), "traffic")
            self._traffic.append(counters)

    def traffic(self) -> list[Traffic]:
        return [
            Traffic(*counters.numpy().tolist()) for counters in self._traffic
        ]

    def _make_shard(self, rank: int, device: str | None) -> Shard:
        """Makes the shard of one of this process's replicas."""
        return Shard(self.tables, self.optimizers, device, self._freezing)

    def _rows_on_shard(self, table: TableSpec) -> int:
        """The number of a table's rows on each shard that has some."""
        return max(len(part.rows) for part in self._parts(table).values())

    @abc.abstractmethod
    def _parts(self, table: TableSpec) -> dict[int, Part]:
        """The parts of a table, by the ranks of the shards that have them."""

    def _held(self, parts: Mapping[int, Part]) -> list[tuple[Part, Shard]]:
        """This process's parts of a table, with their shards.

        They are in the order of their columns, then of the local replicas.
        """
        ranks = self._replicas.ranks
        held = [
            (parts[rank], shard)
            for rank, shard in zip(ranks, self._shards, strict=True)
            if rank in parts
        ]
        return sorted(held, key=lambda each: each[0].columns or (0, 0))

    def _rounding(self, rank: int, table: TableSpec) -> Rounding:
        """How a replica rounds the new rows of its part of a table."""
        part = self._parts(table)[rank]
        column, _ = part.columns or (0, 0)
        return rounding.of_part(table, part.rows.start, part.rows.step, column)

    def _initial_blocks(
        self, table: TableSpec
    ) -> Iterable[tuple[int, tf.Tensor]]:
        """A table's initial rows; see `initial_values.initial_blocks`."""
        return initial_blocks(table)

    def _expose(self, state: TableState) -> None:
        """Adds a table's variables, as one for all shards, to its state.

        The shards get the table's initial rows before.
        """
        table = state.spec
        held = self._held(self._parts(table))
        exchange = None
        if self._replicas.workers > 1 and not self._copied:
            # One process doesn't need it.
            from tfrs_embed.storage.retrieval import Exchange

            parts = self._parts(table)
            exchange = Exchange(self._replicas, parts, table.name)
        state.exchange = exchange
        state.sources = [
            (part, shard.store)
            for part, shard in (held[:1] if self._copied else held)
        ]
        slots = state.rule_slots.items()
        rows = {name: slot.row(table.dim) for name, slot in slots}
        for key, row in {PARAMETERS: (table.dim,), **rows}.items():
            parts = self._parts(table)
            if not row:  # One number for each row has no columns.
                parts = {rank: Part(p.rows) for rank, p in parts.items()}
            variables = [
                (part, shard.store.variables(table.name)[key])
                for part, shard in self._held(parts)
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
    def step(self) -> Any:
        return self._step

    @property
    def together(self) -> JointEngine:
        return self

    def consensus(self, training: bool = False) -> ReplicaConsensus | None:
        replica = self._replicas.current(self._name)
        if replica is not None:
            self._traffic[replica].assign_add([1, 0, 0])
        return self._consensus_on(_TRAINING_LOOKUP if training else _LOOKUP)

    def all_agree(self, ok: tf.Tensor) -> tf.Tensor:
        consensus = self._consensus_on(_UPDATE)
        return ok if consensus is None else consensus.agree(ok)[0]

    def _consensus_on(self, action: str) -> ReplicaConsensus | None:
        """The replicas' consensus on an action; None outside of replicas."""
        replica = self._replicas.current(self._name)
        if replica is None:
            return None
        self._compare(action)
        what = f"{action} of {self._name}"
        return ReplicaConsensus(self._replicas, replica, self._number, what)

    def _compare(self, action: str) -> None:
        """Compares an action with the other workers', the first time.

        Raises:
            RuntimeError: they do something else.
        """
        if action not in self._compared:
            self._compared.add(action)
            what = f"{action} of {self._name}"
            handshake.compare_actions(self._strategy, what)

    def lookup(self, call: LookupCall) -> tuple[list[tf.Tensor], Any]:
        replica = self._replicas.current(self._name)
        if replica is None:
            return self._lookup_outside(call.bags), None
        with self._replicas.counting(replica, self._traffic[replica]):
            return self._lookup(replica, call)

    @abc.abstractmethod
    def _lookup(
        self, replica: int, call: LookupCall
    ) -> tuple[list[tf.Tensor], Residuals]:
        """Looks up in a replica; see `lookup`."""

    def _lookup_outside(self, bags: Sequence[BaggedIds]) -> list[tf.Tensor]:
        """Looks up outside of any replica: each feature's [count, dim]."""
        if self._replicas.workers > 1:
            return self._refuse_outside(bags)
        found = []
        for feature, b in zip(self.features, bags, strict=True):
            rows = widen(self._rows_outside(feature.table.name, b.ids))
            found.append(lookup_ops.combine(rows, None, b))
        return found

    def _rows_outside(self, table: str, ids: tf.Tensor) -> tf.Tensor:
        """Rows of a table, [n, dim], outside of any replica, in one process."""
        raise NotImplementedError

    def _refuse_outside(self, bags: Sequence[BaggedIds]) -> list[tf.Tensor]:
        """Fails when it runs: the tables are of several workers.

        Returns zeros to graphs; raises a RuntimeError in a SavedModel.
        """
        text = (
            f"{self._name} is sharded over {self._replicas.workers} workers "
            "and can only be called inside strategy.run."
        )
        if save_context.in_save_context():
            raise RuntimeError(f"{text} tfrs_embed.serving.export exports it.")
        remote = tf.debugging.Assert(False, [text])
        with tf.control_dependencies([remote] if remote else []):
            return [
                tf.zeros([b.count, f.table.dim])
                for f, b in zip(self.features, bags, strict=True)
            ]

    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        if residuals is None:
            refuse_to_train(
                f"{self._name} is trained by all replicas together: call it, "
                "and the gradient, inside strategy.run."
            )
            return
        self._compare(_UPDATE)
        # No table is trained if there is no room for another's keys.
        after = graphs.capture(residuals.after if self.gives_rows else [])
        replica = residuals.replica
        counted = self._replicas.counting(replica, self._traffic[replica])
        clipped, measured = (
            functools.partial(self._total, replica, self._norms_channel + i)
            for i in range(2)
        )
        with tf.control_dependencies(after), counted:
            self._shards[replica].update(
                self._contributions(residuals, gradients),
                residuals.after,
                norm_factors(self.optimizers, clipped),
                measured,
            )

    def _total(
        self, replica: int, channel: int, values: tf.Tensor
    ) -> tf.Tensor:
        """Sums numbers, float32 of a fixed shape, over all shards."""
        return self._replicas.sum(replica, values, channel)

    def _running_replica(self) -> int:
        return self._replicas.current(self._name) or 0

    @abc.abstractmethod
    def _contributions(
        self, residuals: Residuals, gradients: Sequence[tf.Tensor]
    ) -> dict[str, GradientContributions]:
        """Gathers a shard's gradients from all replicas, by table."""
