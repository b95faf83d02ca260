"""Tables whose keys come and go, spread over the replicas of a strategy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs import FeatureSpec, TableSpec
from tfrs_embed.distribution import key_shards
from tfrs_embed.distribution.exchange import Received
from tfrs_embed.engines.collective import NEW_KEYS, Residuals
from tfrs_embed.engines.dynamic import (
    EngineOfKeys,
    refuse_pipelining,
    refuse_to_trace,
)
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.row_wise import RowWiseEngine
from tfrs_embed.engines.table_group import TableGroup
from tfrs_embed.engines.tables.dynamic import DynamicTable
from tfrs_embed.engines.tables.key_rules import TRASH, rows_at_first
from tfrs_embed.engines.tables.key_table import Found
from tfrs_embed.engines.tables.keyed_shard import KeyedShard
from tfrs_embed.engines.tables.reservation import Request, commit, reserve
from tfrs_embed.engines.tables.state import TableState
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.messages import Route
from tfrs_embed.optimizers.rules import TableOptimizer


class DynamicShardedEngine(EngineOfKeys, RowWiseEngine):
    """Spreads keys over the replicas of a strategy, and gives them rows there.

    Each shard has rows for vocabulary_size / replicas keys and evicts by
    itself.

    Args:
        features: the features to look up, in the order of each call.
        optimizers: each table's optimizer by the table's name, or None for a
            table that is not trained: its keys get no rows.
        options: the other arguments.

    Raises:
        NotImplementedError: the updates are to be pipelined, or the strategy's
            collectives can't be used.
    """

    def __init__(
        self,
        features: Sequence[FeatureSpec],
        optimizers: dict[str, TableOptimizer | None],
        options: EngineOptions,
    ) -> None:
        refuse_pipelining(options)
        super().__init__(features, optimizers, options)
        # By table, each local replica's.
        self._rows: dict[str, Sequence[KeyedShard]] = {}

    joins_groups = True

    def _make_groups(self) -> list[TableGroup]:
        # A group numbers its tables' rows one after the other, which can't be
        # done with keys.
        world = self._replicas.world
        self._first_shards = dict.fromkeys(self.states, 0)
        return [
            TableGroup([state.spec], self.features, world)
            for state in self.states.values()
        ]

    def _rows_on_shard(self, table: TableSpec) -> int:
        return rows_at_first(table, self._replicas.world)

    def _fill(self, table: TableSpec) -> None:
        """Keys get their initial rows when they come."""

    def _expose(self, state: TableState) -> None:
        assert isinstance(state, DynamicTable)
        name = state.spec.name
        self._rows[name] = state.expose(
            self._name,
            [shard.store(name) for shard in self._shards],
            self._replicas,
            self._strategy,
            self._shards[0].step,
        )

    def _lookup(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        training: bool,
        dtype: tf.DType,
        begun: Any,
    ) -> tuple[list[tf.Tensor], Residuals]:
        refuse_to_trace(self._name)
        return super()._lookup(replica, bags, training, dtype, begun)

    def _lookup_outside(self, bags: Sequence[BaggedIds]) -> list[tf.Tensor]:
        refuse_to_trace(self._name)
        return super()._lookup_outside(bags)

    def _by_vectors(self, feature: int, bags: BaggedIds) -> bool:
        return False  # A bag's keys have to be found before they are rows.

    def _numbers(self, ids: tf.Tensor) -> tf.Tensor:
        return key_shards.numbers_of(ids, self._replicas.world)

    def _keys(self, replica: int, quotients: tf.Tensor) -> tf.Tensor:
        """The keys that were sent to a shard, from their numbers' quotients."""
        world, rank = self._replicas.world, self._replicas.ranks[replica]
        if world == 1:
            return quotients
        return key_shards.keys_of(quotients * world + rank, world)

    def _table_of(self, group: int) -> str:
        [table] = self._groups[group].tables
        return table.name

    def _locate(
        self,
        replica: int,
        numbers: Sequence[int],
        routes: Sequence[Route],
        received: Sequence[Received],
        training: bool,
    ) -> Sequence[Received]:
        located = list(received)
        keys_of = {}
        for i, asked in enumerate(received):
            table = self._table_of(numbers[i])
            keys = self._keys(replica, asked.rows)
            if training and self.optimizers[table] is not None:
                keys_of[i] = keys
                continue
            there = self._rows[table][replica].key_table.look_up(keys)
            located[i] = asked._replace(**there._asdict())
        if not keys_of:
            return located
        # Those of tables without an optimizer travel with the others'.
        units = [
            unit
            for unit in self._row_exchange.units(numbers)
            if any(i in keys_of for i in unit)
        ]
        counted = [i for unit in units for i in unit]
        counts = self._row_exchange.send_counts(
            replica,
            [received[i] for i in counted],
            [_occurrences(routes[i]) for i in counted],
        )
        consensus = self._consensus_on(NEW_KEYS)
        if consensus is not None:
            # The counts and the consensus are more than other lookups have.
            sent = [self._row_exchange.sent(received[i])[1] for i, *_ in units]
            collectives = self._row_exchange.stages * len(units) + 1
            self._count_traffic(replica, collectives, 8 * tf.add_n(sent))
        step = tf.convert_to_tensor(self._shards[replica].step) + 1
        requests = {
            i: Request(
                self._rows[self._table_of(numbers[i])][replica],
                keys_of[i],
                each,
                step,
            )
            for i, each in zip(counted, counts, strict=True)
            if i in keys_of
        }
        reserved = reserve(list(requests.values()), consensus)
        for i, each in zip(requests, reserved, strict=True):
            located[i] = located[i]._replace(rows=each.rows, reservation=each)
        return located

    def _check_read(
        self, replica: int, group: int, asked: Received, rows: tf.Tensor
    ) -> tf.Tensor:
        if asked.reservation is not None:
            return rows  # A training step relies on being the only one.
        found = Found(asked.rows, asked.version)
        return self._rows[self._table_of(group)][replica].check_vectors(
            found, rows
        )

    def _settle(
        self,
        replica: int,
        received: Sequence[Received],
        gradients: Sequence[tf.Tensor],
    ) -> Sequence[Received]:
        reserved = {
            i: asked.reservation
            for i, asked in enumerate(received)
            if asked.reservation is not None
        }
        # Not in a step whose loss, or its gradient, fails.
        with tf.control_dependencies(list(gradients)):
            committed = commit(list(reserved.values()))
        settled = list(received)
        for i, rows in zip(reserved, committed, strict=True):
            settled[i] = received[i]._replace(rows=rows)
        return settled

    def _read_outside(
        self, replica: int, table: str, keys: tf.Tensor
    ) -> tf.Tensor:
        shard = self._rows[table][replica]
        keys = self._keys(replica, keys)
        return shard.read(shard.key_table.look_up(keys))

    def _trained(self, received: Received) -> tf.Tensor:
        rows = tf.gather(received.rows, received.places)
        trained = tf.where(tf.not_equal(rows, TRASH))[:, 0]
        return tf.gather(received.places, trained)


def _occurrences(routed: Route) -> tf.Tensor:
    """How often each unique key of a replica occurs, [u] int64."""
    return tf.math.unsorted_segment_sum(
        tf.ones_like(routed.index, tf.int64),
        routed.index,
        tf.size(routed.row),
    )
