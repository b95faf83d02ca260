"""Tables whose rows are spread over the replicas of a strategy.

Row i of a table is row i // world of shard i % world; a replica's shard is the
one of its rank. Tables of one width are exchanged together: their rows are
numbered one table after the other on each shard. Of hot rows each replica has a
copy beside its shard; see `hot_rows`.

A step's ids go through `RowInput`, `RowLookup` and `RowOutput`, or, where that
sends less, their bags and vectors through a `VectorExchange`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.configs.tables import FeatureSpec, TableSpec, bytes_of
from tfrs_embed.distribution import agreement, consensus, hot_rows, row_exchange
from tfrs_embed.distribution.consensus import Preparation
from tfrs_embed.distribution.exchange_kind import (
    first_ranks,
    vectors_are_less,
)
from tfrs_embed.distribution.vector_exchange import (
    VectorExchange,
    VectorsReceived,
)
from tfrs_embed.engines.collective import CollectiveEngine, Residuals
from tfrs_embed.engines.hot_rows import HotRows
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.row_distribution import (
    Asked,
    RowInput,
    RowLookup,
    RowOutput,
)
from tfrs_embed.engines.shard import Shard
from tfrs_embed.engines.table_group import (
    TableGroup,
    by_kind,
    rows_per_shard,
)
from tfrs_embed.ops import lookup as lookup_ops
from tfrs_embed.ops import rounding
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.rounding import Rounding, widen
from tfrs_embed.ops.update import GradientContributions, add_bags
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.storage.sharded import Part


class _Begun(NamedTuple):
    """A lookup whose ids are not sent yet.

    Attributes:
        by_vectors: the places of the features that are exchanged by vectors.
        asked: the keys of the others.
        sizes: [k + 1] int64: those of `RowExchange.sizes`, then the most bags
            of a feature that is exchanged by vectors. This replica's, or all
            replicas'.
    """

    by_vectors: list[int]
    asked: Asked
    sizes: Any


class _Kept(NamedTuple):
    """The results of a lookup that its update needs, besides the bags.

    Attributes:
        asked: what was exchanged by rows.
        vectors: the bags that this replica was asked for; None: there are none.
    """

    asked: Asked
    vectors: VectorsReceived | None


class RowWiseEngine(CollectiveEngine):
    """Spreads each table's rows over the replicas of a strategy.

    Each replica looks up its own part of the global batch; all must call
    together. Gradients are summed over the replicas.
    """

    begins_early = True

    def __init__(
        self,
        features: Sequence[FeatureSpec],
        optimizers: dict[str, TableOptimizer | None],
        options: EngineOptions,
    ) -> None:
        super().__init__(features, optimizers, options)
        world = self._replicas.world
        self._first_shards = first_ranks(self.states, world)
        self._hot_rows = HotRows(
            [s.spec for s in self.states.values()],
            self.optimizers,
            self._first_shards,
            world,
        )

    def _build(self) -> None:
        self._sizes_channel = self._replicas.allocate(1)
        self._vectors = VectorExchange(
            self._replicas,
            self._name,
            self.features,
            self._first_shards,
            self._wire,
        )
        groups = self._make_groups()
        self._row_exchange = row_exchange.make(
            self._replicas,
            [(g.dim, self._wire.of_rows(g.dtype)) for g in groups],
            self._wire,
        )
        self._hot_rows.build(self._replicas, self._shards, groups)
        self._lookup_of_rows = self._make_lookup()
        self._input = RowInput(
            self._row_exchange, groups, self._hot_rows, self._lookup_of_rows
        )
        self._output = RowOutput(
            self._row_exchange,
            self._hot_rows,
            self._lookup_of_rows,
            self._replicas,
            self._wire,
        )
        super()._build()

    def _make_shard(self, rank: int, device: str | None) -> Shard:
        return Shard(
            [*(s.spec for s in self.states.values()), *self._hot_rows.copies],
            {**self.optimizers, **self._hot_rows.optimizers},
            self._pipelined,
            device,
        )

    def _make_groups(self) -> list[TableGroup]:
        """Groups the tables whose rows are exchanged together."""
        return by_kind(
            lambda table: (table.dim, table.dtype),
            [s.spec for s in self.states.values()],
            self.features,
            self._replicas.world,
            self._first_shards,
        )

    def _make_lookup(self) -> RowLookup:
        """Makes what shards do with the keys that they are asked for."""
        return RowLookup(self._shards, self._wire)

    def _rows_on_shard(self, table: TableSpec) -> int:
        if table in self._hot_rows.copies:
            return table.vocabulary_size
        return rows_per_shard(table, self._replicas.world)

    def _rounding(self, rank: int, table: TableSpec) -> Rounding:
        if table in self._hot_rows.copies:
            # By bits of their own, the same on all replicas.
            return rounding.of_part(table)
        first = self._position(table.name, rank)
        return rounding.of_part(table, first, self._replicas.world)

    def _fill(self, table: TableSpec) -> None:
        super()._fill(table)
        self._hot_rows.fill(table.name, self._shards)

    def _parts(self, table: TableSpec) -> dict[int, Part]:
        world = self._replicas.world
        return {
            rank: Part(
                range(
                    self._position(table.name, rank),
                    table.vocabulary_size,
                    world,
                )
            )
            for rank in range(world)
        }

    def _position(self, table: str, rank: int) -> int:
        """How many ranks a table's shard is behind that of its row 0."""
        return (rank - self._first_shards[table]) % self._replicas.world

    def _composite_options(
        self, table: str, variable: str, shards: Sequence[tf.Variable]
    ) -> dict[str, Any]:
        hot = self._hot_rows.tables.get(table)
        if hot is None:
            return {}
        copies = [s.variables[hot.copies.name][variable] for s in self._shards]
        options: dict[str, Any] = {
            "on_write": functools.partial(hot.write, copies)
        }
        if self._pipelined:
            # A SavedModel's lookups read shards, but apply deferred updates
            # before.
            options["exported"] = [*shards, *copies]
        return options

    def _lookup(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        training: bool,
        dtype: tf.DType,
        begun: Any,
    ) -> tuple[list[tf.Tensor], Residuals]:
        if begun is None:
            # No consensus has found the sizes of all replicas.
            begun = self._begin(replica, bags, training)
            weighted = [b.weights is not None for b in bags]
            facts = self._vectors.facts(begun.by_vectors, bags, weighted)
            sizes = agreement.agreed_max(
                self._replicas,
                replica,
                begun.sizes,
                [facts],
                self._sizes_channel,
            )
            begun = begun._replace(sizes=sizes)
        by_vectors, asked, sizes = begun
        counted = self._replicas.sent[replica]
        asked = self._input.send(replica, asked, sizes, training)
        asked, rows = self._lookup_of_rows.look_up(replica, asked, training)
        asked, activations = self._output.send(
            replica, bags, asked, rows, training
        )
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
            sums = self._shards[replica].lookup(
                [self.features[i].table.name for i in by_vectors],
                vectors.bags,
                training,
                self._wire.dtype,
            )
            activations.update(
                self._vectors.send_vectors(replica, bags, vectors, sums)
            )
            after += [b.ids for b in vectors.bags]
        kept = _Kept(asked, vectors)
        return (
            [activations[i] for i in range(len(bags))],
            Residuals(replica, list(bags), kept, after),
        )

    def _by_vectors(self, feature: int, bags: BaggedIds) -> bool:
        """Whether a feature's vectors travel, and not its rows."""
        size = bags.bag_size
        table = self.features[feature].table
        # A table that has hot rows always goes by rows: a vector would take as
        # many bytes without the ids that have copies.
        return (
            size is not None
            # A bag's keys have to be found before they are rows.
            and table.keys is None
            and table.name not in self._hot_rows.tables
            and vectors_are_less(
                size,
                table.dim,
                self._replicas.world,
                self._wire.size,
                bytes_of(table),
            )
        )

    def _begin(
        self, replica: int, bags: Sequence[BaggedIds], training: bool
    ) -> _Begun:
        """Begins a lookup: finds where ids are to be sent, and the sizes here.

        Args:
            replica: the local replica.
            bags: each feature's bags; ids may be out of range.
            training: whether this is part of a training step.
        """
        by_vectors = [i for i, b in enumerate(bags) if self._by_vectors(i, b)]
        asked = self._input.begin(replica, bags, by_vectors, training)
        most = tf.constant(0, tf.int64)
        if by_vectors:
            counts = tf.stack([bags[i].count for i in by_vectors])
            most = tf.cast(tf.reduce_max(counts), tf.int64)
        return _Begun(
            by_vectors, asked, [*self._row_exchange.sizes(asked.routes), most]
        )

    def _prepare(
        self,
        training: bool,
        features: Sequence[FeatureSpec],
        bags: Sequence[BaggedIds],
        weighted: Sequence[bool],
    ) -> Preparation | None:
        replica = self._replicas.current(self._name)
        place = {id(feature): i for i, feature in enumerate(features)}
        mine = [place.get(id(feature)) for feature in self.features]
        if replica is None or all(i is None for i in mine):
            return None
        # One more is of vectors.
        if self._row_exchange.num_sizes >= consensus.MOST_SIZES:
            return None
        # As the layer completes what a call leaves out.
        bags = [
            BaggedIds.none(f) if i is None else bags[i]
            for f, i in zip(self.features, mine, strict=True)
        ]
        begun = self._begin(replica, bags, training)
        # What the consensus passes on, once the ids are known to be valid.
        parts = begun.asked.routes, begun.asked.hot

        def finish(tensors: list[tf.Tensor], longest: tf.Tensor) -> _Begun:
            routes, hot = tf.nest.pack_sequence_as(parts, tensors)
            asked = begun.asked._replace(routes=routes, hot=hot)
            return begun._replace(asked=asked, sizes=longest)

        return Preparation(
            tf.nest.flatten(parts),
            begun.sizes,
            self._vectors.facts(
                begun.by_vectors,
                bags,
                [i is not None and weighted[i] for i in mine],
            ),
            finish,
        )

    def _contributions(
        self, residuals: Residuals, gradients: Sequence[tf.Tensor]
    ) -> dict[str, GradientContributions]:
        replica, bags, kept = residuals.replica, residuals.bags, residuals.kept
        got, of_copies = self._output.send_gradients(
            replica, bags, kept.asked, gradients
        )
        contributions = self._lookup_of_rows.contributions(
            replica, kept.asked, got
        )
        contributions.update(of_copies)
        for each in hot_rows.collectives(self._hot_rows.floats):
            size = each.sent(self._replicas.world)
            self._replicas.sent[replica].add(bytes=size, least=size)
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

    def _lookup_outside(self, bags: Sequence[BaggedIds]) -> list[tf.Tensor]:
        # The shards must all be of this process.
        world = self._replicas.world
        if self._replicas.workers > 1:
            return self._refuse_outside(bags)
        self.apply_deferred()
        activations = []
        for feature, b in zip(self.features, bags, strict=True):
            name = feature.table.name
            positions = [self._position(name, r) for r in self._replicas.ranks]
            keys = self._lookup_of_rows.keys(b.ids)
            owner = tf.cast(tf.math.floormod(keys, world), tf.int32)
            rows = tf.dynamic_partition(
                tf.math.floordiv(keys, world), owner, world
            )
            places = tf.dynamic_partition(
                tf.range(tf.size(b.ids)), owner, world
            )
            found = tf.dynamic_stitch(
                places,
                [
                    self._lookup_of_rows.read_outside(
                        positions.index(p), name, mine
                    )
                    for p, mine in enumerate(rows)
                ],
            )
            activations.append(lookup_ops.combine(widen(found), None, b))
        return activations
