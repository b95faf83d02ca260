"""Tables whose rows are spread over the replicas of a strategy.

Row i of a table is row i // world of shard i % world; a replica's shard is the
one of its rank. Tables of one width are exchanged together: their rows are
numbered one table after the other on each shard. Of hot rows each replica has a
copy beside its shard; see `hot_rows`.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.configs import FeatureSpec, TableSpec, bytes_of
from tfrs_embed.distribution import (
    alike,
    consensus,
    hot_rows,
    row_exchange,
)
from tfrs_embed.distribution.consensus import Preparation
from tfrs_embed.distribution.exchange import Received
from tfrs_embed.distribution.exchange_kind import (
    all_reduce_bytes,
    first_ranks,
    vectors_are_less,
)
from tfrs_embed.distribution.hot_rows import HotKeys
from tfrs_embed.distribution.vector_exchange import VectorsReceived
from tfrs_embed.engines.collective import CollectiveEngine, Residuals
from tfrs_embed.engines.hot_rows import HotRows
from tfrs_embed.engines.shard import Shard
from tfrs_embed.engines.table_group import (
    TableGroup,
    by_width_and_dtype,
    rows_per_shard,
)
from tfrs_embed.engines.tables.sharded import Part, ShardedVariable
from tfrs_embed.engines.traffic import Sent
from tfrs_embed.engines.vector_distribution import VectorDistribution
from tfrs_embed.initial_values import initial_blocks
from tfrs_embed.ops import backend, rounding
from tfrs_embed.ops import lookup as lookup_ops
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.messages import Route
from tfrs_embed.ops.rounding import Rounding, widen
from tfrs_embed.ops.update import PARAMETERS, GradientContributions


class _Kept(NamedTuple):
    """The results of a lookup that its update needs, besides the bags.

    Attributes:
        groups: the groups of tables that are exchanged by rows, by their places
            among the engine's.
        positions: for each group, each feature's [n] int32: the places of its
            ids' rows among those that came back.
        received: for each group, the keys that this replica was asked for.
        hot: for each group that has hot rows, by its place, those of its keys.
        by_vectors: the places of the features that are exchanged by vectors.
        vectors: the bags that this replica was asked for; None: there are none.
    """

    groups: dict[int, TableGroup]
    positions: list[list[tf.Tensor]]
    received: list[Received]
    hot: dict[int, HotKeys]
    by_vectors: list[int]
    vectors: VectorsReceived | None


class _Begun(NamedTuple):
    """A lookup whose ids are not sent yet.

    Attributes:
        by_vectors: the places of the features that are exchanged by vectors.
        groups: the groups of tables that are exchanged by rows; see `_Kept`.
        routes: where the keys of each of these groups are sent.
        hot: the keys of hot rows, which are not; see `_Kept`.
        sizes: [k + 1] int64: those of `RowExchange.sizes`, then the most bags
            of a feature that is exchanged by vectors. This replica's, or all
            replicas'.
    """

    by_vectors: list[int]
    groups: dict[int, TableGroup]
    routes: list[Route]
    hot: dict[int, HotKeys]
    sizes: Any


class RowWiseEngine(CollectiveEngine):
    """Spreads each table's rows over the replicas of a strategy.

    Each replica looks up its own part of the global batch; all must call
    together. Gradients are summed over the replicas.
    """

    begins_early = True
    #: Whether groups of one width are exchanged together.
    joins_groups = False

    def _make_shards(self) -> list[Shard]:
        tables = [s.spec for s in self.states.values()]
        world = self._replicas.world
        self._hot_rows = HotRows(
            tables, self.optimizers, first_ranks(self.states, world), world
        )
        return [
            Shard(
                [*tables, *self._hot_rows.copies],
                {**self.optimizers, **self._hot_rows.optimizers},
                self._pipelined,
                device,
            )
            for device in self._replicas.devices
        ]

    def _make_groups(self) -> list[TableGroup]:
        tables = [s.spec for s in self.states.values()]
        world = self._replicas.world
        self._first_shards = first_ranks(self.states, world)
        return by_width_and_dtype(
            tables, self.features, world, self._first_shards
        )

    def _build(self) -> None:
        self._sizes_channel = self._replicas.allocate(alike.CHANNELS)
        self._vectors = VectorDistribution(
            self._name,
            self.features,
            self._replicas,
            self._shards,
            self._first_shards,
            self._wire,
        )
        # Rows of two bytes are sent as they are.
        self._wires = [self._wire.of_rows(g.dtype) for g in self._groups]
        self._row_exchange = row_exchange.make(
            self._replicas,
            len(self._groups),
            self._wire,
            list(zip((g.dim for g in self._groups), self._wires, strict=True))
            if self.joins_groups
            else None,
        )
        self._hot_rows.build(self._replicas, self._shards, self._groups)
        super()._build()

    def _rows_on_shard(self, table: TableSpec) -> int:
        if table in self._hot_rows.copies:
            return table.vocabulary_size
        return rows_per_shard(table, self._replicas.world)

    def _rounding(self, rank: int, table: TableSpec) -> Rounding:
        if table in self._hot_rows.copies:
            # By bits of their own, the same on all replicas.
            return rounding.of_part(table)
        world = self._replicas.world
        first = self._position(table.name, rank)
        return rounding.of_part(table, first, world)

    def _fill(self, table: TableSpec) -> None:
        variables = [s.variables[table.name][PARAMETERS] for s in self._shards]
        held = self._held(table, variables)
        for start, block in initial_blocks(table):
            for part, variable in held:
                part.write(variable, start, block)
        self._hot_rows.fill(table.name, self._shards)

    def _make_composite(
        self, name: str, shape: tuple[int, ...], shards: list[tf.Variable]
    ) -> ShardedVariable:
        table, _, variable = name.rpartition("/")
        spec = self.states[table].spec
        exported, on_write = shards, None
        if hot := self._hot_rows.tables.get(table):
            copies = [
                s.variables[hot.copies.name][variable] for s in self._shards
            ]
            on_write = functools.partial(hot.write, copies)
            if self._pipelined:
                # A SavedModel's lookups read shards, but apply deferred updates
                # before.
                exported = [*shards, *copies]
        return ShardedVariable(
            name,
            shape,
            self._held(spec, shards),
            self._strategy,
            shards[0].dtype,
            replicas=self._replicas,
            parts={
                rank: self._part(spec, rank)
                for rank in range(self._replicas.world)
            },
            exported=exported,
            on_write=on_write,
        )

    def _position(self, table: str, rank: int) -> int:
        """How many ranks a table's shard is behind that of its row 0."""
        return (rank - self._first_shards[table]) % self._replicas.world

    def _part(self, table: TableSpec, rank: int) -> Part:
        """The rows of a table on a rank's shard."""
        first = self._position(table.name, rank)
        return Part(range(first, table.vocabulary_size, self._replicas.world))

    def _held(
        self, table: TableSpec, shards: Sequence[tf.Variable]
    ) -> list[tuple[Part, tf.Variable]]:
        """This process's shards of a table, each with its rows."""
        ranks = self._replicas.ranks
        return [
            (self._part(table, rank), shard)
            for rank, shard in zip(ranks, shards, strict=True)
        ]

    def _lookup(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        training: bool,
        dtype: tf.DType,
        begun: Any,
    ) -> tuple[list[tf.Tensor], Residuals]:
        sent = Sent()
        if begun is None:
            begun = self._begin(replica, bags, training)
            weighted = [b.weights is not None for b in bags]
            begun = begun._replace(
                sizes=alike.agreed_max(
                    self._replicas,
                    replica,
                    begun.sizes,
                    self._vectors.facts(begun.by_vectors, bags, weighted),
                    self._sizes_channel,
                )
            )
            sent = Sent(1)
        activations: list[Any] = [None] * len(bags)
        positions, received = self._lookup_rows(
            replica, bags, begun, training, activations
        )
        sent = sent.plus(*self._sent_forward(replica, begun, received))
        after = [asked.rows for asked in received]
        vectors = None
        if begun.by_vectors:
            vectors, of_vectors = self._vectors.look_up(
                replica,
                bags,
                begun.by_vectors,
                begun.sizes[-1],
                training,
                activations,
            )
            sent = sent.plus(*of_vectors)
            after += [b.ids for b in vectors.bags]
        self._count(replica, sent)
        kept = _Kept(
            begun.groups,
            positions,
            list(received),
            begun.hot,
            begun.by_vectors,
            vectors,
        )
        return activations, Residuals(replica, list(bags), kept, after)

    def _by_vectors(self, feature: int, bags: BaggedIds) -> bool:
        """Whether a feature's vectors travel, and not its rows."""
        size = bags.bag_size
        table = self.features[feature].table
        # A table that has hot rows always goes by rows: a vector would take as
        # many bytes without the ids that have copies.
        return (
            size is not None
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
        groups = {
            i: used
            for i, group in enumerate(self._groups)
            if (used := group.without(by_vectors)).features
        }
        device = self._shards[replica].device
        routes = [
            self._row_exchange.route(
                self._numbers(group.keys(bags)), device, training
            )
            for group in groups.values()
        ]
        hot = {}
        for place, i in enumerate(groups):
            of_group = self._hot_rows.group(i)
            if of_group is not None:
                routes[place], hot[i] = hot_rows.split(
                    routes[place], of_group.keys[replica]
                )
        most = tf.constant(0, tf.int64)
        if by_vectors:
            counts = tf.stack([bags[i].count for i in by_vectors])
            most = tf.cast(tf.reduce_max(counts), tf.int64)
        sizes = [*self._row_exchange.sizes(list(groups), routes), most]
        return _Begun(by_vectors, groups, routes, hot, sizes)

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

        def finish(tensors: list[tf.Tensor], longest: tf.Tensor) -> _Begun:
            routes, hot = tf.nest.pack_sequence_as(
                [begun.routes, begun.hot], tensors
            )
            return begun._replace(routes=routes, hot=hot, sizes=longest)

        return Preparation(
            tf.nest.flatten([begun.routes, begun.hot]),
            begun.sizes,
            self._vectors.facts(
                begun.by_vectors,
                bags,
                [i is not None and weighted[i] for i in mine],
            ),
            finish,
        )

    def _lookup_rows(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        begun: _Begun,
        training: bool,
        activations: list[Any],
    ) -> tuple[list[list[tf.Tensor]], Sequence[Received]]:
        """Fetches rows, and writes what they become to `activations`.

        Returns:
            For each group, the positions and keys of `_Kept`.
        """
        shard = self._shards[replica]
        _, groups, routes, hot, longest = begun
        asked_for = self._row_exchange.send_keys(
            replica, list(groups), routes, longest, shard.device, training
        )
        received = self._locate(
            replica, list(groups), routes, asked_for, training
        )
        read = []
        for (i, group), asked in zip(groups.items(), received, strict=True):
            rows = self._gather(shard, group, asked.rows, training)
            read.append(self._check_read(replica, i, asked, rows))
        answers = self._row_exchange.send_rows(replica, received, read)
        positions = []
        for (i, group), routed, asked, rows in zip(
            groups.items(), routes, received, answers, strict=True
        ):
            position = asked.position
            if i in hot:
                rows, position = self._add_copies(
                    shard, i, hot[i], rows, position, training
                )
            mine = group.select(bags)
            index = tf.split(
                tf.gather(position, routed.index),
                [tf.size(b.ids) for b in mine],
            )
            operations = backend.of(shard.device, training)
            vectors = operations.combine(rows, index, mine)
            for j, vector in zip(group.features, vectors, strict=True):
                activations[j] = vector
            positions.append(index)
        return positions, received

    def _add_copies(
        self,
        shard: Shard,
        number: int,
        hot: HotKeys,
        rows: tf.Tensor,
        position: tf.Tensor,
        training: bool,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Adds hot rows to those that came back.

        Args:
            shard: the replica's.
            number: the group's.
            hot: the keys of hot rows.
            rows: [m, dim], those that came back, in the wire's dtype, to which
                copies are rounded too.
            position: [u] int32, the places there of the keys that were sent.
            training: whether the tables are about to be updated.

        Returns:
            All rows, and the places of all unique keys' rows.
        """
        of_group = self._hot_rows.group(number)
        assert of_group is not None
        places = tf.cast(hot.places, tf.int64)
        copies = self._gather(shard, of_group.copies, places, training)
        behind = tf.shape(rows)[0] + tf.range(tf.size(places))
        position = tf.gather(tf.concat([position, behind], 0), hot.order)
        return tf.concat([rows, copies], 0), position

    def _contributions(
        self, residuals: Residuals, gradients: Sequence[tf.Tensor]
    ) -> dict[str, GradientContributions]:
        replica, kept = residuals.replica, residuals.kept
        contributions: dict[str, GradientContributions] = {}
        device = self._shards[replica].device
        sums = []
        of_copies = {}
        for (i, group), asked, positions in zip(
            kept.groups.items(), kept.received, kept.positions, strict=True
        ):
            count = self._row_exchange.num_rows(asked)
            copies = tf.size(kept.hot[i].places) if i in kept.hot else 0
            sent = backend.of(device, training=True).sum_gradients_by_row(
                group.select(gradients),
                group.select(residuals.bags),
                tf.concat(positions, 0),
                count + copies,
                # Those of copies are added up as float32.
                tf.float32 if i in kept.hot else self._wire.dtype,
            )
            if i in kept.hot:
                of_copies[i] = kept.hot[i], sent[count:]
                sent = sent[:count]
            sums.append(sent)
        gradients_of = self._row_exchange.send_gradients(
            replica, kept.received, sums, device
        )
        settled = self._settle(replica, kept.received, gradients_of)
        for group, asked, got in zip(
            kept.groups.values(), settled, gradients_of, strict=True
        ):
            places = self._trained(asked)
            rows = tf.gather(asked.rows, places)
            contributions.update(group.contributions(rows, places, got))
        contributions.update(self._hot_rows.contributions(replica, of_copies))
        sent = self._sent_backward(kept)
        if kept.vectors is not None:
            of_vectors = self._vectors.add_gradients(
                replica,
                residuals.bags,
                kept.by_vectors,
                kept.vectors,
                gradients,
                contributions,
            )
            sent = sent.plus(*of_vectors)
        self._count(replica, sent)
        return contributions

    def _locate(
        self,
        replica: int,
        numbers: Sequence[int],
        routes: Sequence[Route],
        received: Sequence[Received],
        training: bool,
    ) -> Sequence[Received]:
        """Turns the keys that were asked for into rows of this shard.

        Args:
            replica: the local replica whose shard it is.
            numbers: the groups.
            routes: for each group, the keys that the replica asked for.
            received: for each group, the keys that it was asked for.
            training: whether the tables are about to be updated.
        """
        return received

    def _check_read(
        self, replica: int, group: int, asked: Received, rows: tf.Tensor
    ) -> tf.Tensor:
        """Rows of a group, [n, dim], that were read where `_locate` said."""
        return rows

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

    def _read_outside(
        self, replica: int, table: str, keys: tf.Tensor
    ) -> tf.Tensor:
        """Rows, [n, dim], of keys of a shard, without a replica that asks."""
        return self._shards[replica].gather([table], [keys])[0]

    def _numbers(self, ids: tf.Tensor) -> tf.Tensor:
        """The numbers by which ids are sent: row // world, shard % world."""
        return ids

    def _gather(
        self,
        shard: Shard,
        group: TableGroup,
        rows: tf.Tensor,
        training: bool,
    ) -> tf.Tensor:
        """Rows of a shard, [n, dim], as they are sent."""
        by_table, table = group.split(rows)
        wire = self._wire.of_rows(group.dtype)
        names = [t.name for t in group.tables]
        found = shard.gather(names, by_table, training, wire.dtype)
        if table is None:
            return wire.encode(found[0])
        places = tf.dynamic_partition(
            tf.range(tf.size(rows)), table, len(by_table)
        )
        return wire.encode(tf.dynamic_stitch(places, found))

    def _trained(self, received: Received) -> tf.Tensor:
        """The places, [n] int32, of the rows asked for that are trained."""
        return received.places

    def _lookup_outside(self, bags: Sequence[BaggedIds]) -> list[tf.Tensor]:
        # The shards must all be of this process.
        world = self._replicas.world
        if self._replicas.workers > 1:
            return self._refuse_outside(bags)
        self.apply_deferred()
        activations = []
        for feature, b in zip(self.features, bags, strict=True):
            name = feature.table.name
            ranks = self._replicas.ranks
            positions = [self._position(name, rank) for rank in ranks]
            by_position = [positions.index(p) for p in range(world)]
            numbers = self._numbers(b.ids)
            owner = tf.cast(tf.math.floormod(numbers, world), tf.int32)
            rows = tf.dynamic_partition(
                tf.math.floordiv(numbers, world), owner, world
            )
            places = tf.dynamic_partition(
                tf.range(tf.size(b.ids)), owner, world
            )
            found = tf.dynamic_stitch(
                places,
                [
                    self._read_outside(i, feature.table.name, r)
                    for i, r in zip(by_position, rows, strict=True)
                ],
            )
            activations.append(lookup_ops.combine(widen(found), None, b))
        return activations

    def _sent_forward(
        self, replica: int, begun: _Begun, received: Sequence[Received]
    ) -> Sent:
        """What a lookup's keys and rows have sent."""
        if self._replicas.world == 1:
            return Sent()
        stages, numbers = self._row_exchange.stages, list(begun.groups)
        units = self._row_exchange.units(numbers)
        sent = Sent(2 * stages * len(units) + (stages - 1 if units else 0))
        for first, *others in units:
            dim = begun.groups[numbers[first]].dim
            row = self._wires[numbers[first]].size * dim
            messages, keys = self._row_exchange.sent(received[first])
            sent = sent.plus(bytes=keys * row + 8 * (messages + keys))
            for i in (first, *others):
                routed = begun.routes[i]
                needed = self._row_exchange.needed(replica, routed, received[i])
                sent = sent.plus(
                    least=needed * (8 + row + self._wire.size * dim),
                    unique=tf.reduce_sum(routed.counts),
                )
        for hot in begun.hot.values():
            sent = sent.plus(unique=tf.size(hot.places, tf.int64))
        return sent

    def _sent_backward(self, kept: _Kept) -> Sent:
        """What the gradients of rows, and of copies, have sent."""
        if self._replicas.world == 1:
            return Sent()
        numbers = list(kept.groups)
        units = self._row_exchange.units(numbers)
        sent = Sent(self._row_exchange.stages * len(units))
        for first, *_ in units:
            _, keys = self._row_exchange.sent(kept.received[first])
            dim = kept.groups[numbers[first]].dim
            sent = sent.plus(bytes=keys * self._wire.size * dim)
        if self._hot_rows.floats:
            size = all_reduce_bytes(self._hot_rows.floats, self._replicas.world)
            sent = sent.plus(1, size, size)
        return sent
