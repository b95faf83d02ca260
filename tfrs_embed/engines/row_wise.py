"""Tables whose rows are spread over the replicas of a strategy.

Row i of a table is row i // world of shard i % world; a replica's shard is the
one of its rank. Tables of one width are exchanged together: their rows are
numbered one table after the other on each shard. Each replica has copies of hot
rows beside its shard; see `hot_rows`.

A step's ids go through `RowInput`, `RowLookup` and `RowOutput`, or, where that
sends less, their bags and vectors through a `VectorExchange`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.checkpoint.rows import RowNumbers
from tfrs_embed.configs.tables import TableSpec, bytes_of
from tfrs_embed.distribution import agreement, consensus, hot_rows, row_exchange
from tfrs_embed.distribution.exchange_kind import (
    first_ranks,
    vectors_are_less,
)
from tfrs_embed.distribution.vector_exchange import (
    VectorExchange,
    VectorsReceived,
)
from tfrs_embed.engines.collective import CollectiveEngine, Residuals
from tfrs_embed.engines.engine import LookupCall
from tfrs_embed.engines.hot_row_copies import HotRows
from tfrs_embed.engines.joint_decisions import NEW_KEYS
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.row_distribution import (
    RowInput,
    RowLookup,
    RowOutput,
    RowRequest,
)
from tfrs_embed.engines.shard import Shard
from tfrs_embed.engines.table_group import TableGroup, by_kind
from tfrs_embed.ops.bags import BaggedIds, id_dtype
from tfrs_embed.ops.checks import EarlyLookup
from tfrs_embed.ops.update import GradientContributions, add_bags
from tfrs_embed.ops.validation import UncheckedIds
from tfrs_embed.storage.sharded import Part
from tfrs_embed.storage.table_state import TableState


class _StartedLookup(NamedTuple):
    """A lookup whose ids are not sent yet.

    Attributes:
        by_vectors: the indices of features that are exchanged by vectors.
        asked: the keys of the others.
        sizes: [k + 1] int64, of this replica or the maximum of all:
            `RowExchange.sizes`, and the most bags of a feature by vectors.
    """

    by_vectors: list[int]
    asked: RowRequest
    sizes: Any


class _RowResiduals(NamedTuple):
    """The exchange by rows, and the bags that this replica received, if any."""

    asked: RowRequest
    vectors: VectorsReceived | None


class RowWiseEngine(CollectiveEngine):
    """Spreads each table's rows over the replicas of a strategy."""

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        world = self._replicas.world
        self._first_shards = first_ranks(self.states, world)
        if self.gives_rows:
            # A key's shard depends on nothing but the key.
            self._first_shards = dict.fromkeys(self.states, 0)
        self._hot_rows = HotRows(
            self.tables, self.optimizers, self._first_shards, world
        )

    def _prepare(self) -> None:
        self._sizes_channel = self._replicas.allocate(1)
        self._vectors = VectorExchange(
            self._replicas,
            self._name,
            self.features,
            self._first_shards,
            self._wire,
        )
        groups = [
            TableGroup(
                tables,
                self.features,
                self._replicas.world,
                self._first_shards,
                self.optimizers[tables[0].name] is not None,
            )
            for tables in by_kind(self._kind, self.tables)
        ]
        self._row_exchange = row_exchange.make(
            self._replicas,
            [(g.dim, self._wire.of_rows(g.dtype)) for g in groups],
            self._wire,
        )
        self._hot_rows.build(self._replicas, self._shards, groups)
        self._group_of = {
            t.name: group for group in groups for t in group.tables
        }
        self._lookup_of_rows = RowLookup(
            self._shards,
            self._replicas,
            self._row_exchange,
            self._wire,
            lambda: self._joint.on(NEW_KEYS),
        )
        self._input = RowInput(self._row_exchange, groups, self._hot_rows)
        self._output = RowOutput(
            self._row_exchange,
            self._hot_rows,
            self._lookup_of_rows,
            self._replicas,
            self._wire,
        )

    def _make_shard(self, rank: int, device: str | None) -> Shard:
        tables, optimizers = [*self.tables], {**self.optimizers}
        for hot in self._hot_rows.tables.values():
            tables.append(hot.copies)
            optimizers[hot.copies.name] = optimizers[hot.table.name]
        return Shard(tables, optimizers, device, self._freezing)

    def _kind(self, table: TableSpec) -> tuple[Any, ...]:
        """The kind of tables whose rows are exchanged together."""
        trained = self.optimizers[table.name] is not None
        # Shared rows are found for all of a group's keys in one way.
        shared = table.keys and table.keys.fallback_rows
        return table.dim, table.dtype, table.keys is None or trained, shared

    def _expose(self, state: TableState) -> None:
        super()._expose(state)
        self._hot_rows.fill(state, self._shards)

    def _parts(self, table: TableSpec) -> dict[int, Part]:
        world, rows = self._replicas.world, table.vocabulary_size
        if table.name not in self.states:
            # All replicas round their copies with the same random bits.
            return dict.fromkeys(range(world), Part(range(rows)))
        return {
            rank: Part(range(self._position(table.name, rank), rows, world))
            for rank in range(world)
        }

    def _position(self, table: str, rank: int) -> int:
        """The distance in ranks from the shard of a table's row 0."""
        return (rank - self._first_shards[table]) % self._replicas.world

    def _on_write(
        self, table: str, variable: str
    ) -> Callable[[RowNumbers, tf.Tensor], None] | None:
        hot = self._hot_rows.tables.get(table)
        if hot is None:
            return None
        name = hot.copies.name
        copies = [s.store.variables(name)[variable] for s in self._shards]
        return functools.partial(hot.write, copies)

    def _lookup(
        self, replica: int, call: LookupCall
    ) -> tuple[list[tf.Tensor], Residuals]:
        bags, training, begun = call.bags, call.training, call.begun
        if begun is None:
            # No consensus has found the maximum sizes.
            begun = self._begin(replica, bags, training)
            weighted = [b.weights is not None for b in bags]
            facts = self._vectors.facts(begun.by_vectors, bags, weighted)
            channel = self._sizes_channel
            sizes = agreement.agreed_max(
                self._replicas, replica, begun.sizes, [facts], channel
            )
            begun = begun._replace(sizes=sizes)
        by_vectors, asked, sizes = begun
        counted = self._replicas.sent[replica]
        # The bags that have begun lack weights.
        asked = self._input.send(asked._replace(bags=bags), sizes)
        asked, rows = self._lookup_of_rows.lookup(asked)
        asked, activations = self._output.send(asked, rows)
        for route in asked.routes.values():
            counted.add(unique=tf.size(route.row, tf.int64))
        for hot in asked.hot.values():
            counted.add(unique=tf.size(hot.places, tf.int64))
        after = [received.rows for received in asked.received.values()]
        vectors = None
        if by_vectors:
            vectors = self._vectors.send_bags(
                replica, bags, by_vectors, sizes[-1], training
            )
            sums = self._shards[replica].store.lookup(
                [self.features[i].table.name for i in by_vectors],
                vectors.bags,
                training,
                self._wire.dtype,
            )
            activations.update(
                self._vectors.send_vectors(replica, bags, vectors, sums)
            )
            after += [b.ids for b in vectors.bags]
        residuals = Residuals(
            replica, list(bags), _RowResiduals(asked, vectors), after
        )
        return [activations[i] for i in range(len(bags))], residuals

    def _by_vectors(self, feature: int, bags: BaggedIds) -> bool:
        """Whether a feature's vectors are exchanged instead of its rows."""
        size, table = bags.bag_size, self.features[feature].table
        # Keys have to be found before they are rows. Tables with hot rows are
        # always exchanged by rows: without the copied ids, vectors would take
        # as many bytes. Messages of bags have ids of 32 bits.
        if id_dtype(table) != tf.int32 or table.name in self._hot_rows.tables:
            return False
        world, sent = self._replicas.world, self._wire.size
        return size is not None and vectors_are_less(
            size, table.dim, world, sent, bytes_of(table)
        )

    def _begin(
        self, replica: int, bags: Sequence[BaggedIds], training: bool
    ) -> _StartedLookup:
        """Finds the shards of ids, and the sizes here; ids may be invalid."""
        by_vectors = [i for i, b in enumerate(bags) if self._by_vectors(i, b)]
        asked = self._input.begin(replica, bags, by_vectors, training)
        most = tf.constant(0, tf.int64)
        if by_vectors:
            counts = tf.stack([bags[i].count for i in by_vectors])
            most = tf.cast(tf.reduce_max(counts), tf.int64)
        return _StartedLookup(
            by_vectors, asked, [*self._row_exchange.sizes(asked.routes), most]
        )

    def _begin_early(
        self, ids: UncheckedIds, training: bool
    ) -> EarlyLookup | None:
        """Begins a lookup; see `JointDecisions.begin`."""
        replica = self._joint.running()
        given = [each.feature for each in ids.parsed]
        place = {id(feature): i for i, feature in enumerate(given)}
        mine = [place.get(id(feature)) for feature in self.features]
        if replica is None or all(i is None for i in mine):
            return None
        # Vectors need one more size.
        if self._row_exchange.num_sizes >= consensus.MOST_SIZES:
            return None
        # Like the layer, completes the features left out.
        unchecked = ids.bags()
        bags = [
            BaggedIds.none(f) if i is None else unchecked[i]
            for f, i in zip(self.features, mine, strict=True)
        ]
        begun = self._begin(replica, bags, training)
        # The tensors that exist once the ids are valid.
        parts = begun.asked.routes, begun.asked.hot

        def finish(
            tensors: list[tf.Tensor], longest: tf.Tensor
        ) -> _StartedLookup:
            routes, hot = tf.nest.pack_sequence_as(parts, tensors)
            asked = begun.asked._replace(routes=routes, hot=hot)
            return begun._replace(asked=asked, sizes=longest)

        have_weights = [
            i is not None and ids.parsed[i].weights is not None for i in mine
        ]
        facts = self._vectors.facts(begun.by_vectors, bags, have_weights)
        return EarlyLookup(tf.nest.flatten(parts), begun.sizes, facts, finish)

    def _contributions(
        self, residuals: Residuals, gradients: Sequence[tf.Tensor]
    ) -> dict[str, GradientContributions]:
        replica, bags, kept = residuals.replica, residuals.bags, residuals.kept
        got, of_copies = self._output.send_gradients(kept.asked, gradients)
        contributions = self._lookup_of_rows.contributions(kept.asked, got)
        contributions.update(of_copies)
        for each in hot_rows.collectives(self._hot_rows.floats):
            size = each.sent(self._replicas.world)
            self._replicas.sent[replica].add(bytes=size)
        if kept.vectors is not None:
            of_bags = self._vectors.send_gradients(
                replica, bags, kept.vectors, gradients
            )
            for i, b, gradient in zip(
                kept.vectors.features, kept.vectors.bags, of_bags, strict=True
            ):
                table = self.features[i].table.name
                add_bags(contributions, table, b, gradient)
        return contributions

    def _rows_outside(self, table: str, ids: tf.Tensor) -> tf.Tensor:
        world, group = self._replicas.world, self._group_of[table]
        numbers = ids
        if group.keyed:
            numbers = group.numbers_of(ids)
        owner = tf.cast(tf.math.floormod(numbers, world), tf.int32)
        rows = tf.dynamic_partition(
            tf.math.floordiv(numbers, world), owner, world
        )
        places = tf.dynamic_partition(tf.range(tf.size(ids)), owner, world)
        # A number's remainder is the distance from the table's first shard.
        first = self._first_shards[table]
        found = [
            self._lookup_of_rows.read_outside(
                group, (first + p) % world, table, mine
            )
            for p, mine in enumerate(rows)
        ]
        return tf.dynamic_stitch(places, found)
