"""Tables with `DynamicKeys`, spread over the replicas of a strategy."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.distribution import key_shards
from tfrs_embed.distribution.consensus import ReplicaConsensus
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.distribution.row_exchange import COUNTS, Received, RowExchange
from tfrs_embed.engines.collective import NEW_KEYS
from tfrs_embed.engines.dynamic import refuse_to_trace
from tfrs_embed.engines.row_distribution import Asked, RowLookup
from tfrs_embed.engines.row_wise import RowWiseEngine
from tfrs_embed.engines.table_group import TableGroup
from tfrs_embed.ops.messages import Route
from tfrs_embed.ops.update import GradientContributions
from tfrs_embed.storage.dynamic_table import DynamicTable
from tfrs_embed.storage.key_rules import TRASH, rows_at_first
from tfrs_embed.storage.key_table import Found
from tfrs_embed.storage.keyed_shard import KeyedShard, KeyedShards
from tfrs_embed.storage.reservation import Request, Reservation, commit, reserve
from tfrs_embed.storage.table_state import TableState


@dataclasses.dataclass
class KeyedLookup(RowLookup):
    """Finds keys' rows on a shard, gives rows to new ones, and reads them.

    A group's tables are all trained, or all not.

    Attributes:
        rows: each table's shards of keys, by its name.
        trained: the names of the tables whose new keys get rows.
        agree: returns the consensus on giving rows to new keys.
        mixed: whether a hash of a key decides its shard.
    """

    name: str
    replicas: Replicas
    rows: Mapping[str, Sequence[KeyedShard]]
    trained: Sequence[str]
    exchange: RowExchange
    agree: Callable[[], ReplicaConsensus | None]
    mixed: bool

    def keys(self, ids: tf.Tensor) -> tf.Tensor:
        refuse_to_trace(self.name)
        return key_shards.numbers_of(ids, self.replicas.world, self.mixed)

    def _ids(self, replica: int, quotients: tf.Tensor) -> tf.Tensor:
        """The ids that were sent to a shard, from their keys' quotients."""
        world, rank = self.replicas.world, self.replicas.ranks[replica]
        numbers = quotients * world + rank
        return key_shards.keys_of(numbers, world, self.mixed)

    def look_up(
        self, replica: int, asked: Asked, training: bool
    ) -> tuple[Asked, dict[int, tf.Tensor]]:
        found = asked._replace(received=self._find(replica, asked, training))
        rows = super().look_up(replica, found, training)[1]
        for i, each in found.received.items():
            # No other thread changes rows in a training step.
            if isinstance(each.keyed, Found):
                tables = self._tables(replica, asked.groups[i]).key_tables
                rows[i] = tables.check_vectors(each.keyed, rows[i])
        return found, rows

    def _find(
        self, replica: int, asked: Asked, training: bool
    ) -> dict[int, Received]:
        """Finds rows; reserves some for new keys in a step of training."""
        keyed: dict[int, Any] = {}
        requests = {}
        step = tf.convert_to_tensor(self.shards[replica].step) + 1
        for i, each in asked.received.items():
            group = asked.groups[i]
            tables = self._tables(replica, group)
            keys = self._ids(replica, each.rows)
            # A group's tables are all trained, or all not.
            if training and group.tables[0].name in self.trained:
                requests[i] = Request(tables, keys, each.table_of, None, step)
            else:
                keyed[i] = tables.key_tables.look_up(keys, each.table_of)
        if requests:
            counts = self.exchange.send(
                replica,
                {i: asked.received[i] for i in requests},
                {i: _occurrences(asked.routes[i]) for i in requests},
                COUNTS,
            )
            counted = [
                r._replace(counts=counts[i]) for i, r in requests.items()
            ]
            reserved = reserve(counted, self.agree())
            keyed.update(zip(requests, reserved, strict=True))
        return {
            i: each._replace(
                rows=asked.groups[i].number(keyed[i].rows, each.table_of),
                keyed=keyed[i],
            )
            for i, each in asked.received.items()
        }

    def contributions(
        self, replica: int, asked: Asked, gradients: Mapping[int, tf.Tensor]
    ) -> dict[str, GradientContributions]:
        # Not if the loss or its gradient fails.
        with tf.control_dependencies(list(gradients.values())):
            reserved = {
                i: each.keyed
                for i, each in asked.received.items()
                if isinstance(each.keyed, Reservation)
            }
            committed = commit(list(reserved.values()))
        rows_of = dict(zip(reserved, committed, strict=True))
        trained = {}
        for i, each in asked.received.items():
            if i not in rows_of:
                continue  # A table without an optimizer.
            of_keys = tf.not_equal(tf.gather(rows_of[i], each.places), TRASH)
            trained[i] = each._replace(
                rows=asked.groups[i].number(rows_of[i], each.table_of),
                places=tf.gather(each.places, tf.where(of_keys)[:, 0]),
            )
        return super().contributions(
            replica, asked._replace(received=trained), gradients
        )

    def _tables(self, replica: int, group: TableGroup) -> KeyedShards:
        """A replica's shards of a group's tables."""
        return KeyedShards([self.rows[t.name][replica] for t in group.tables])

    def read_outside(
        self, replica: int, table: str, rows: tf.Tensor
    ) -> tf.Tensor:
        shard = self.rows[table][replica]
        return shard.read(shard.key_table.look_up(self._ids(replica, rows)))


class DynamicShardedEngine(RowWiseEngine):
    """Spreads keys over the replicas of a strategy, and gives them rows there.

    Each shard has rows for vocabulary_size / replicas keys and evicts by
    itself.
    """

    _State = DynamicTable

    def _build(self) -> None:
        # A key's shard depends on nothing but the key.
        self._first_shards = dict.fromkeys(self.states, 0)
        # By table, the shards of local replicas.
        self._rows: dict[str, Sequence[KeyedShard]] = {}
        super()._build()

    def _kind(self, table: TableSpec) -> tuple[Any, ...]:
        return table.dim, self.optimizers[table.name] is not None

    def _make_lookup(self) -> RowLookup:
        return KeyedLookup(
            self._shards,
            self._wire,
            self._name,
            self._replicas,
            self._rows,
            [t for t, optimizer in self.optimizers.items() if optimizer],
            self._row_exchange,
            functools.partial(self._consensus_on, NEW_KEYS),
            all(t.keys.MIXED for t in self.tables if t.keys is not None),
        )

    def _rows_on_shard(self, table: TableSpec) -> int:
        return rows_at_first(table, self._replicas.world)

    def _fill(self, table: TableSpec) -> None:
        """Keys get their initial rows when they come."""

    def _expose(self, state: TableState) -> None:
        assert isinstance(state, DynamicTable)
        name = state.spec.name
        self._rows[name] = state.expose(
            self._name,
            [shard.store for shard in self._shards],
            self._replicas,
            self._strategy,
            self._shards[0].step,
        )


def _occurrences(routed: Route) -> tf.Tensor:
    """How often each unique key of a replica occurs, [u] int64."""
    return tf.math.unsorted_segment_sum(
        tf.ones_like(routed.index, tf.int64), routed.index, tf.size(routed.row)
    )
