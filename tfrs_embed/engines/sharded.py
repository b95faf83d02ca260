"""Tables whose rows are spread over the replicas of a strategy.

Row i of a table is row i // world of shard i % world; a replica's shard is the
one of its rank. Tables of one width travel together: their rows are numbered
one table after the other on each shard, and exchanged as if they were one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.configs import FeatureSpec, TableSpec
from tfrs_embed.distribution import consensus, exchange, handshake, replicas
from tfrs_embed.distribution.exchange import Exchange, Received, Route
from tfrs_embed.engines.engine import Engine, TableState
from tfrs_embed.engines.initial_values import initial_blocks
from tfrs_embed.engines.shard import Shard, make_variable
from tfrs_embed.engines.sharded_table import ShardedStep, ShardedTable
from tfrs_embed.ops import lookup as lookup_ops
from tfrs_embed.ops.bags import Bags
from tfrs_embed.ops.update import Uses, scatter_update
from tfrs_embed.optimizers import TableOptimizer


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one replica sent since its tables were built.

    Attributes:
        collectives: collectives that it took part in.
        bytes: bytes of keys, rows and gradients sent to other replicas,
            padding included.
        least_bytes: the same without padding: 8 bytes for each unique key
            whose row another replica holds, and its row and gradient.
        unique_keys: unique keys looked up, of all tables.
    """

    collectives: int
    bytes: int
    least_bytes: int
    unique_keys: int


class _Residuals(NamedTuple):
    """What a lookup leaves for the update: an entry per width."""

    replica: int
    bags: list[Bags]
    slots: list[list[tf.Tensor]]
    received: list[Received]


class Group:
    """The tables of one width, and the features that are looked up in them.

    Args:
        dim: the width.
        tables: the tables.
        features: the places of their features among the engine's.
        world: the number of shards.
    """

    def __init__(
        self,
        dim: int,
        tables: Sequence[TableSpec],
        features: Sequence[int],
        world: int,
    ) -> None:
        self.dim = dim
        self.tables = tuple(tables)
        self.features = tuple(features)
        self.first_row: dict[str, int] = {}
        self._first_rows = []
        row = 0
        for table in tables:
            self.first_row[table.name] = row
            self._first_rows.append(row)
            row += rows_per_shard(table, world)

    def split(self, rows: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        """Splits rows of all tables into rows of each.

        Args:
            rows: [n] int64.

        Returns:
            Each table's own rows, and the table of each of the n, or None if
            there is one table.
        """
        if len(self.tables) == 1:
            return [rows], None
        table = tf.searchsorted(
            tf.constant(self._first_rows, tf.int64), rows, side="right"
        )
        table -= 1
        rows -= tf.gather(tf.constant(self._first_rows, tf.int64), table)
        return tf.dynamic_partition(rows, table, len(self.tables)), table


class ShardedEngine(Engine):
    """Spreads each table's rows over the replicas of a strategy.

    Each replica looks up its own part of the global batch; all must call
    together. Gradients are summed over the replicas.

    Args:
        features: the features to look up, in the order of each call.
        optimizers: each table's optimizer by the table's name, or None for a
            table that is not trained.
        pipelined: whether updates overlap the next step; see
            `OneDeviceEngine`.
        strategy: the strategy.
        name: whose tables these are, for errors.

    Raises:
        NotImplementedError: the strategy's collectives can't be used.
    """

    def __init__(
        self,
        features: Sequence[FeatureSpec],
        optimizers: dict[str, TableOptimizer | None],
        pipelined: bool,
        strategy: tf.distribute.Strategy,
        name: str,
    ) -> None:
        super().__init__(features, optimizers)
        self._name = name
        self._strategy = strategy
        self._replicas = replicas.of(strategy)
        self._pipelined = pipelined
        tables = [s.spec for s in self.states.values()]
        world = self._replicas.world
        self._groups = [
            Group(
                dim,
                [t for t in tables if t.dim == dim],
                [i for i, f in enumerate(features) if f.table.dim == dim],
                world,
            )
            for dim in dict.fromkeys(t.dim for t in tables)
        ]
        self._shards = [
            Shard(tables, optimizers, pipelined, device)
            for device in self._replicas.devices
        ]
        self._step: ShardedStep | None = None
        self._traffic: list[tf.Variable] = []

    def build(self) -> None:
        """See the base class.

        With several workers all must build the same tables in the same order.

        Raises:
            RuntimeError: they don't.
        """
        if self._step is not None:
            return
        with tf.init_scope():
            self._build()

    def _build(self) -> None:
        world = self._replicas.world
        handshake.shake(self._replicas, self._name, self._describe())
        self._sizes_slot = self._replicas.allocate(1)
        self._consensus_slot = self._replicas.allocate(consensus.SLOTS)
        self._exchanges = [
            Exchange(self._replicas, self._replicas.allocate(exchange.SLOTS))
            for _ in self._groups
        ]
        ranks = self._replicas.ranks
        for shard in self._shards:
            shard.build(
                lambda table: rows_per_shard(table, world),
                lambda table, variable: None,
            )
            with tf.device(shard.device):
                self._traffic.append(
                    make_variable(tf.zeros([4], tf.int64), "traffic")
                )
        for state in self.states.values():
            self._fill(state.spec, ranks)
            self._expose(state)
        self._step = ShardedStep(self._shards, self._strategy)
        self.pending = [s.pending for s in self._shards if s.pending]
        self.follow_step()

    def _expose(self, state: TableState) -> None:
        """Adds what is to be seen of a table's shards to its state."""
        table = state.spec
        for key in self._shards[0].variables[table.name]:
            state.add(
                key,
                ShardedTable(
                    f"{table.name}/{key}",
                    (table.vocabulary_size, table.dim),
                    [s.variables[table.name][key] for s in self._shards],
                    self._replicas,
                    self._strategy,
                ),
            )

    def _describe(self) -> str:
        tables = [
            f"{t.name} [{t.vocabulary_size}, {t.dim}] trained by "
            f"{self.optimizers[t.name]}"
            for t in (s.spec for s in self.states.values())
        ]
        features = [f"{f.name} in {f.table.name}" for f in self.features]
        return (
            f"tables {', '.join(tables)}; features {', '.join(features)}; "
            f"pipelined {self._pipelined}"
        )

    def _fill(self, table: TableSpec, ranks: Sequence[int]) -> None:
        """Gives each shard its initial rows, from blocks of the table."""
        world = self._replicas.world
        for start, block in initial_blocks(table):
            for rank, shard in zip(ranks, self._shards, strict=True):
                first = (rank - start) % world
                rows = block[first::world]
                row = (start + first) // world
                scatter_update(
                    shard.variables[table.name]["parameters"],
                    tf.range(row, row + rows.shape[0]),
                    rows,
                )

    @property
    def step(self) -> Any:
        """See the base class."""
        return self._step

    @property
    def held_whole(self) -> bool:
        """See the base class."""
        return self._replicas.world == 1

    def traffic(self) -> list[Traffic]:
        """What each local replica sent since the tables were built."""
        return [
            Traffic(*(int(n) for n in counters.numpy()))
            for counters in self._traffic
        ]

    def consensus(self) -> consensus.ReplicaConsensus | None:
        """See the base class."""
        replica = self._replicas.current(self._name)
        if replica is None or self._replicas.world == 1:
            return None
        return consensus.ReplicaConsensus(
            self._replicas, replica, self._consensus_slot
        )

    def all_agree(self, ok: tf.Tensor) -> tf.Tensor:
        """See the base class."""
        together = self.consensus()
        return ok if together is None else together.holds(ok)

    def lookup(
        self,
        bags: Sequence[Bags],
        training: bool,
        dtype: tf.DType = tf.float32,
    ) -> tuple[list[tf.Tensor], Any]:
        """See the base class.

        Outside of any replica it is made of all shards, if they are here.
        """
        replica = self._replicas.current(self._name)
        if replica is None:
            return self._stitched(bags), None
        shard = self._shards[replica]
        if not training:
            shard.drain()
        activations: list[Any] = [None] * len(bags)
        received, slots = [], []
        routes = [
            self._route(group, bags, shard.device, training)
            for group in self._groups
        ]
        longest = self._replicas.max(
            replica,
            tf.stack([tf.reduce_max(r.counts) for r in routes]),
            self._sizes_slot,
        )
        for i, (group, routed, swap) in enumerate(
            zip(self._groups, routes, self._exchanges, strict=True)
        ):
            asked = swap.send_keys(replica, routed, longest[i])
            asked = self._locate(replica, asked, training)
            rows = swap.send_rows(
                replica, asked, self._gather(shard, group, asked.rows)
            )
            index = tf.split(
                tf.gather(asked.slot, routed.index),
                [tf.size(bags[j].ids) for j in group.features],
            )
            vectors = lookup_ops.combine_all(
                rows,
                index,
                [bags[j] for j in group.features],
                shard.device,
                training,
            )
            for j, vector in zip(group.features, vectors, strict=True):
                activations[j] = vector
            received.append(asked)
            slots.append(index)
        self._count(replica, routes, received, forward=True)
        if training:
            # After the lookups, and not at all if the ids are bad.
            with tf.control_dependencies([r.rows for r in received]):
                shard.drain()
        return activations, _Residuals(replica, list(bags), slots, received)

    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        """See the base class.

        Raises:
            RuntimeError: the lookup was not made by a replica.
        """
        if residuals is None:
            self._refuse_to_train(
                f"{self._name} is sharded over replicas, which train it "
                "together: call it, and the gradient, inside strategy.run."
            )
            return
        replica = residuals.replica
        shard, world = self._shards[replica], self._replicas.world
        uses = {}
        for i, (group, swap) in enumerate(
            zip(self._groups, self._exchanges, strict=True)
        ):
            asked = residuals.received[i]
            mine = [residuals.bags[j] for j in group.features]
            sent = lookup_ops.spread(
                [gradients[j] for j in group.features],
                mine,
                tf.concat(residuals.slots[i], 0),
                world * asked.capacity,
                shard.device,
            )
            got = swap.send_gradients(replica, asked, sent)
            uses.update(self._by_table(group, self._trained(asked), got))
        self._count(replica, None, residuals.received, forward=False)
        shard.update(uses, after=[r.rows for r in residuals.received])

    def drop_pending(self) -> None:
        """See the base class."""
        for shard in self._shards:
            shard.drop_pending()

    def drain(self) -> None:
        """See the base class."""
        replica = None
        if tf.distribute.in_cross_replica_context() is False:
            replica = self._replicas.current(self._name)
        for shard in (
            self._shards if replica is None else [self._shards[replica]]
        ):
            shard.drain()

    def _locate(
        self, replica: int, received: Received, training: bool
    ) -> Received:
        """Turns the keys that were asked for into rows of this shard."""
        return received

    def _find(self, replica: int, keys: tf.Tensor) -> tf.Tensor:
        """The same without a replica that asks: keys [n] int64, rows alike."""
        return keys

    def _read(self, shard: Shard, name: str, rows: tf.Tensor) -> tf.Tensor:
        """Rows of a table, [n, dim], that `_locate` or `_find` returned."""
        return shard.gather(name, rows)

    def _route(
        self,
        group: Group,
        bags: Sequence[Bags],
        device: str | None,
        training: bool,
    ) -> Route:
        """Routes the ids of a group's features."""
        world = self._replicas.world
        keys = []
        for i in group.features:
            first = group.first_row[self.features[i].table.name]
            ids = tf.cast(bags[i].ids, tf.int64)
            keys.append(ids + world * first if first else ids)
        return exchange.route(
            keys[0] if len(keys) == 1 else tf.concat(keys, 0),
            world,
            device,
            training,
        )

    def _gather(self, shard: Shard, group: Group, rows: tf.Tensor) -> tf.Tensor:
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

    def _trained(self, received: Received) -> Received:
        """Marks as not there what has no row to train."""
        return received

    def _by_table(
        self, group: Group, received: Received, gradients: tf.Tensor
    ) -> dict[str, Uses]:
        """What changes each trained table of a group."""
        places = tf.where(received.there)[:, 0]
        by_table, table = group.split(tf.gather(received.rows, places))
        places = tf.cast(places, tf.int32)
        places_by_table = (
            [places]
            if table is None
            else tf.dynamic_partition(places, table, len(by_table))
        )
        count = tf.size(received.rows)
        return {
            t.name: Uses([Bags.of_rows(r, p, count)], [gradients], single=True)
            for t, r, p in zip(
                group.tables, by_table, places_by_table, strict=True
            )
            if self.optimizers[t.name] is not None
        }

    def _stitched(self, bags: Sequence[Bags]) -> list[tf.Tensor]:
        """Looks up in all shards, which must all be of this process."""
        world = self._replicas.world
        if self._replicas.workers > 1:
            remote = tf.debugging.Assert(
                False,
                [
                    f"{self._name} is sharded over {self._replicas.workers} "
                    "workers and can only be called inside strategy.run."
                ],
            )
            with tf.control_dependencies([remote] if remote else []):
                return [
                    tf.zeros([b.count, f.table.dim])
                    for f, b in zip(self.features, bags, strict=True)
                ]
        self.drain()
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
                        self._shards[i], feature.table.name, self._find(i, r)
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
        # A consensus on the ids and the capacities, then keys and rows.
        collectives = 2 + 2 * groups if forward else groups
        self._traffic[replica].assign_add(
            tf.stack([tf.constant(collectives, tf.int64), sent, least, unique])
        )


def rows_per_shard(table: TableSpec, world: int) -> int:
    """The rows of a table on each shard; the last may be of no table row."""
    return -(-table.vocabulary_size // world)
