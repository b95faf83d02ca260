"""Tables whose rows are spread over the replicas of a strategy.

Row i of a table is row i // world of shard i % world; a replica's shard is the
one of its rank. Tables of one width are exchanged together: their rows are
numbered one table after the other on each shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.configs import TableSpec
from tfrs_embed.distribution import exchange
from tfrs_embed.distribution.exchange import Exchange, Received, Route
from tfrs_embed.engines.replica_engine import ReplicasEngine, Residuals
from tfrs_embed.engines.shard import Shard
from tfrs_embed.engines.table_group import TableGroup, by_width, rows_per_shard
from tfrs_embed.engines.tables.sharded import ShardedTable, write_shards
from tfrs_embed.initial_values import initial_blocks
from tfrs_embed.ops import lookup as lookup_ops
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.update import PARAMETERS, GradientContributions


class _Kept(NamedTuple):
    """The results of a lookup that its update needs, besides the bags.

    Attributes:
        positions: for each group, each feature's [n] int32: the places of its
            ids' rows among those that came back.
        received: for each group, the keys that this replica was asked for.
    """

    positions: list[list[tf.Tensor]]
    received: list[Received]


class ShardedEngine(ReplicasEngine):
    """Spreads each table's rows over the replicas of a strategy.

    Each replica looks up its own part of the global batch; all must call
    together. Gradients are summed over the replicas.
    """

    def _make_groups(self) -> list[TableGroup]:
        return by_width(
            [s.spec for s in self.states.values()],
            self.features,
            self._replicas.world,
        )

    def _build(self) -> None:
        self._sizes_channel = self._replicas.allocate(1)
        self._exchanges = [
            Exchange(self._replicas, self._replicas.allocate(exchange.CHANNELS))
            for _ in self._groups
        ]
        super()._build()

    def _rows_on_shard(self, table: TableSpec) -> int:
        return rows_per_shard(table, self._replicas.world)

    def _fill(self, table: TableSpec) -> None:
        variables = [s.variables[table.name][PARAMETERS] for s in self._shards]
        by_rank = list(zip(self._replicas.ranks, variables, strict=True))
        for start, block in initial_blocks(table):
            write_shards(by_rank, self._replicas.world, start, block)

    def _make_composite(
        self, name: str, shape: tuple[int, int], shards: list[tf.Variable]
    ) -> ShardedTable:
        return ShardedTable(name, shape, shards, self._replicas, self._strategy)

    def _lookup(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        training: bool,
        dtype: tf.DType,
    ) -> tuple[list[tf.Tensor], Residuals]:
        shard = self._shards[replica]
        activations: list[Any] = [None] * len(bags)
        positions = []
        routes = [
            exchange.route(
                group.keys(bags), self._replicas.world, shard.device, training
            )
            for group in self._groups
        ]
        longest = self._replicas.max(
            replica,
            tf.stack([tf.reduce_max(r.counts) for r in routes]),
            self._sizes_channel,
        )
        asked_for = [
            swap.send_keys(replica, routed, longest[i])
            for i, (routed, swap) in enumerate(
                zip(routes, self._exchanges, strict=True)
            )
        ]
        received = self._locate(replica, routes, asked_for, training)
        for group, routed, swap, asked in zip(
            self._groups, routes, self._exchanges, received, strict=True
        ):
            rows = swap.send_rows(
                replica, asked, self._gather(shard, group, asked.rows)
            )
            mine = group.select(bags)
            index = tf.split(
                tf.gather(asked.position, routed.index),
                [tf.size(b.ids) for b in mine],
            )
            vectors = lookup_ops.combine_all(
                rows, index, mine, shard.device, training
            )
            for j, vector in zip(group.features, vectors, strict=True):
                activations[j] = vector
            positions.append(index)
        self._count(replica, routes, received, forward=True)
        return activations, Residuals(
            replica,
            list(bags),
            _Kept(positions, list(received)),
            [asked.rows for asked in received],
        )

    def _contributions(
        self, residuals: Residuals, gradients: Sequence[tf.Tensor]
    ) -> dict[str, GradientContributions]:
        replica, kept = residuals.replica, residuals.kept
        contributions = {}
        gradients_of = []
        for group, swap, asked, positions in zip(
            self._groups,
            self._exchanges,
            kept.received,
            kept.positions,
            strict=True,
        ):
            sent = lookup_ops.spread(
                group.select(gradients),
                group.select(residuals.bags),
                tf.concat(positions, 0),
                self._replicas.world * asked.capacity,
                self._shards[replica].device,
            )
            gradients_of.append(swap.send_gradients(replica, asked, sent))
        settled = self._settle(replica, kept.received, gradients_of)
        for group, asked, got in zip(
            self._groups, settled, gradients_of, strict=True
        ):
            places = tf.where(self._trained(asked))[:, 0]
            rows = tf.gather(asked.rows, places)
            contributions.update(
                group.contributions(rows, tf.cast(places, tf.int32), got)
            )
        self._count(replica, None, kept.received, forward=False)
        return contributions

    def _locate(
        self,
        replica: int,
        routes: Sequence[Route],
        received: Sequence[Received],
        training: bool,
    ) -> Sequence[Received]:
        """Turns the keys that were asked for into rows of this shard.

        Args:
            replica: the local replica whose shard it is.
            routes: for each group, the keys that the replica asked for.
            received: for each group, the keys that it was asked for.
            training: whether the tables are about to be updated.
        """
        return received

    def _settle(
        self,
        replica: int,
        received: Sequence[Received],
        gradients: Sequence[tf.Tensor],
    ) -> Sequence[Received]:
        """The rows to train.

        Args:
            replica: the local replica whose shard it is.
            received: what `_locate` returned.
            gradients: for each group, the rows' gradients.
        """
        return received

    def _find(self, replica: int, table: str, keys: tf.Tensor) -> tf.Tensor:
        """Rows without a replica that asks: keys [n] int64, rows alike."""
        return keys

    def _keys(self, replica: int, quotients: tf.Tensor) -> tf.Tensor:
        """The keys that were sent to a shard, from their quotients."""
        # A key's route is key // world and key % world, the shard.
        world, rank = self._replicas.world, self._replicas.ranks[replica]
        return quotients if world == 1 else quotients * world + rank

    def _read(self, shard: Shard, name: str, rows: tf.Tensor) -> tf.Tensor:
        """Rows of a table, [n, dim], that `_locate` or `_find` returned."""
        return shard.gather(name, rows)

    def _gather(
        self, shard: Shard, group: TableGroup, rows: tf.Tensor
    ) -> tf.Tensor:
        """Rows of a shard, [n, dim]."""
        by_table, table = group.split(rows)
        found = [
            self._read(shard, t.name, r)
            for t, r in zip(group.tables, by_table, strict=True)
        ]
        if table is None:
            return found[0]
        places = tf.dynamic_partition(
            tf.range(tf.size(rows)), table, len(by_table)
        )
        return tf.dynamic_stitch(places, found)

    def _trained(self, received: Received) -> tf.Tensor:
        """Which of the rows asked for are to be trained: [n] bool."""
        return received.mask

    def _lookup_outside(self, bags: Sequence[BaggedIds]) -> list[tf.Tensor]:
        # The shards must all be of this process.
        world = self._replicas.world
        if self._replicas.workers > 1:
            return self._refuse_outside(bags)
        self.apply_deferred()
        by_rank = [self._replicas.ranks.index(rank) for rank in range(world)]
        activations = []
        for feature, b in zip(self.features, bags, strict=True):
            owner = tf.cast(tf.math.floormod(b.ids, world), tf.int32)
            rows = tf.dynamic_partition(
                tf.math.floordiv(b.ids, world), owner, world
            )
            places = tf.dynamic_partition(
                tf.range(tf.size(b.ids)), owner, world
            )
            found = tf.dynamic_stitch(
                places,
                [
                    self._read(
                        self._shards[i],
                        feature.table.name,
                        self._find(i, feature.table.name, r),
                    )
                    for i, r in zip(by_rank, rows, strict=True)
                ],
            )
            activations.append(lookup_ops.combine(found, None, b))
        return activations

    def _count(
        self,
        replica: int,
        routes: Sequence[Route] | None,
        received: Sequence[Received],
        forward: bool,
    ) -> None:
        """Adds a lookup's or an update's traffic to the counters."""
        world = self._replicas.world
        if world == 1:
            return
        others = tf.constant(world - 1, tf.int64)
        sent = least = unique = tf.constant(0, tf.int64)
        for i, (group, asked) in enumerate(
            zip(self._groups, received, strict=True)
        ):
            row = 4 * group.dim
            size = tf.cast(asked.capacity, tf.int64)
            sent += others * size * row
            if forward and routes is not None:
                sent += others * 8 * (1 + size)
                counts = routes[i].counts
                rank = self._replicas.ranks[replica]
                unique += tf.reduce_sum(counts)
                remote = tf.reduce_sum(counts) - counts[rank]
                least += remote * (8 + 2 * row)
        groups = len(self._groups)
        # A consensus on the ids, and the capacities; then keys and rows.
        collectives = groups
        if forward:
            collectives += self.decides + 1 + groups
        self._count_traffic(replica, collectives, sent, least, unique)
