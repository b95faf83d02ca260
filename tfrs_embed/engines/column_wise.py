"""Tables whose columns are spread over the replicas of a strategy.

Each table, or each of its slices of columns, is on one replica. Bags of ids
travel there, and one vector for each bag comes back, whatever the number of ids
in it. All tables are exchanged together, whatever their widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs import TableSpec
from tfrs_embed.distribution import bag_exchange, handshake
from tfrs_embed.distribution.bag_exchange import BagExchange, BagsReceived
from tfrs_embed.distribution.bag_messages import Piece
from tfrs_embed.distribution.replicas import bucket_of
from tfrs_embed.engines import column_slices
from tfrs_embed.engines.collective import CollectiveEngine, Residuals
from tfrs_embed.engines.shard import Shard
from tfrs_embed.engines.table_group import TableGroup
from tfrs_embed.engines.tables.composite import CompositeTable
from tfrs_embed.engines.tables.sharded import Part, ShardedVariable
from tfrs_embed.engines.tables.state import TableState
from tfrs_embed.initial_values import initial_blocks
from tfrs_embed.ops import lookup as lookup_ops
from tfrs_embed.ops import rounding
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.rounding import Rounding, widen
from tfrs_embed.ops.update import PARAMETERS, GradientContributions

# Ids of larger tables are sent as 64 bits.
_MOST_NARROW = tf.int32.max


class ColumnWiseEngine(CollectiveEngine):
    """Spreads each table's columns over replicas of a strategy.

    Each replica looks up its own part of the global batch; all must call
    together. A replica that holds a table, or a slice of one, looks up all
    replicas' bags in it, and updates it by all of their gradients.

    Attributes:
        slices: each table's slices, in the order of the tables.
    """

    def _make_shards(self) -> list[Shard]:
        tables = [s.spec for s in self.states.values()]
        self.slices = column_slices.assign(tables, self._replicas.world)
        for s in self.slices:
            optimizer = self.optimizers[s.table.name]
            if optimizer is not None:
                column_slices.require_uncut(
                    s.table, len(s.ranks), optimizer.needs_whole_rows
                )
        self._of_table = {s.table.name: s for s in self.slices}
        # Which replica has which rank is known once all workers are there.
        return []

    def _make_groups(self) -> list[TableGroup]:
        return []

    def _describe(self) -> handshake.Facts:
        facts = super()._describe()
        places = {s.table.name: list(s.ranks) for s in self.slices}
        return {**facts, "": {**facts[""], "places": places}}

    def _build(self) -> None:
        ranks = self._replicas.ranks
        self._shards.clear()
        for device, rank in zip(self._replicas.devices, ranks, strict=True):
            mine = [t for s in self.slices if (t := s.on(rank)) is not None]
            optimizers = {t.name: self.optimizers[t.name] for t in mine}
            self._shards.append(
                Shard(mine, optimizers, self._pipelined, device)
            )
        pieces = [
            Piece(
                i,
                feature.table.name,
                rank,
                self._of_table[feature.table.name].width,
                feature.table.vocabulary_size > _MOST_NARROW,
            )
            for i, feature in enumerate(self.features)
            for rank in self._of_table[feature.table.name].ranks
        ]
        self._exchange = BagExchange(
            self._replicas,
            self._replicas.allocate(bag_exchange.CHANNELS),
            pieces,
            self._name,
            [str(feature) for feature in self.features],
            self._wire,
        )
        super()._build()

    def _rows_on_shard(self, table: TableSpec) -> int:
        return table.vocabulary_size

    def _rounding(self, rank: int, table: TableSpec) -> Rounding:
        first = self._of_table[table.name].first_column(rank)
        return rounding.of_part(table, first_column=first)

    def _fill(self, table: TableSpec) -> None:
        parts = self._parts(table)
        # An initializer's draws must be the same whoever holds the table: the
        # next table of this initializer begins where they end.
        for start, block in initial_blocks(table):
            for rank, shard in zip(
                self._replicas.ranks, self._shards, strict=True
            ):
                if rank in parts:
                    variable = shard.variables[table.name][PARAMETERS]
                    parts[rank].write(variable, start, block)

    def _parts(self, table: TableSpec) -> dict[int, Part]:
        """The columns of a table on the ranks that hold some, in order."""
        slices, rows = self._of_table[table.name], range(table.vocabulary_size)
        parts = {}
        for rank in slices.ranks:
            first = slices.first_column(rank)
            parts[rank] = Part(rows, (first, first + slices.width))
        return parts

    def _make_composite(
        self, name: str, shape: tuple[int, ...], shards: list[tf.Variable]
    ) -> CompositeTable:
        raise NotImplementedError("Replicas hold slices of some tables only.")

    def _expose(self, state: TableState) -> None:
        table = state.spec
        optimizer = self.optimizers[table.name]
        slots = optimizer.rule.slots() if optimizer else {}
        rows: dict[str, tuple[int, ...]] = {PARAMETERS: (table.dim,)}
        for name, slot in slots.items():
            rows[name] = slot.row(table.dim)
        for key, row in rows.items():
            parts = self._parts(table)
            if len(row) == 0:
                parts = {rank: Part(p.rows) for rank, p in parts.items()}
            local = zip(self._replicas.ranks, self._shards, strict=True)
            shards = {rank: shard for rank, shard in local if rank in parts}
            state.add(
                key,
                ShardedVariable(
                    f"{table.name}/{key}",
                    (table.vocabulary_size, *row),
                    [
                        (parts[rank], shards[rank].variables[table.name][key])
                        for rank in parts
                        if rank in shards
                    ],
                    self._strategy,
                    tf.as_dtype(
                        table.dtype if key == PARAMETERS else tf.float32
                    ),
                    replicas=self._replicas,
                    parts=parts,
                ),
            )

    def _lookup(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        training: bool,
        dtype: tf.DType,
        begun: Any,
    ) -> tuple[list[tf.Tensor], Residuals]:
        received = self._exchange.send_bags(replica, bags, training)
        mine = self._exchange.here(replica)
        vectors = self._shards[replica].lookup(
            [p.table for p in mine], received.bags, training, self._wire.dtype
        )
        found = self._exchange.send_vectors(
            replica, received, vectors, training
        )
        self._count_lookup(replica, bags, received)
        # They come in the order of the ranks, which need not be the columns'.
        by_piece = {
            (p.feature, p.rank): vector
            for p, vector in zip(self._exchange.pieces, found, strict=True)
        }
        activations = [
            b.scaled(
                _beside(
                    [
                        by_piece[i, rank]
                        for rank in self._of_table[f.table.name].ranks
                    ]
                )
            )
            for i, (f, b) in enumerate(zip(self.features, bags, strict=True))
        ]
        # The messages aren't there if the ids are bad.
        return activations, Residuals(
            replica, list(bags), received, [received.words]
        )

    def _contributions(
        self, residuals: Residuals, gradients: Sequence[tf.Tensor]
    ) -> dict[str, GradientContributions]:
        replica, received = residuals.replica, residuals.kept
        by_piece = {}
        for i, (feature, gradient, b) in enumerate(
            zip(self.features, gradients, residuals.bags, strict=True)
        ):
            ranks = self._of_table[feature.table.name].ranks
            parts = tf.split(b.scaled(gradient), len(ranks), 1)
            for rank, part in zip(ranks, parts, strict=True):
                by_piece[i, rank] = part
        got = self._exchange.send_gradients(
            replica,
            received,
            [by_piece[p.feature, p.rank] for p in self._exchange.pieces],
        )
        self._count_traffic(replica, 1, self._vector_bytes(received))
        contributions: dict[str, GradientContributions] = {}
        for piece, b, gradient in zip(
            self._exchange.here(replica), received.bags, got, strict=True
        ):
            of_table = contributions.setdefault(
                piece.table, GradientContributions([], [])
            )
            contributions[piece.table] = of_table._replace(
                bags=[*of_table.bags, b],
                gradients=[*of_table.gradients, gradient],
            )
        return contributions

    def _lookup_outside(self, bags: Sequence[BaggedIds]) -> list[tf.Tensor]:
        if self._replicas.workers > 1:
            return self._refuse_outside(bags)
        self.apply_deferred()
        by_rank = dict(zip(self._replicas.ranks, self._shards, strict=True))
        return [
            _beside(
                [
                    lookup_ops.combine(
                        widen(
                            *by_rank[rank].gather([feature.table.name], [b.ids])
                        ),
                        None,
                        b,
                    )
                    for rank in self._of_table[feature.table.name].ranks
                ]
            )
            for feature, b in zip(self.features, bags, strict=True)
        ]

    def _vector_bytes(self, received: BagsReceived) -> tf.Tensor:
        """The bytes that vectors, or their gradients, are sent as."""
        capacity = tf.cast(received.capacity, tf.int64)
        others = self._replicas.world - 1
        return self._wire.size * others * self._exchange.unit * capacity

    def _count_lookup(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        received: BagsReceived,
    ) -> None:
        """Adds a lookup's traffic to the counters."""
        others = self._replicas.world - 1
        words = tf.cast(bucket_of(received.words)[0], tf.int64)
        # What is this replica's own business needs no message.
        rank = self._replicas.ranks[replica]
        remote = tf.constant([p.rank != rank for p in self._exchange.pieces])
        sizes, floats = (
            tf.cast(n, tf.int64) for n in (received.sizes, received.floats)
        )
        unit = self._wire.size * self._exchange.unit
        needed = 4 * sizes + 2 * unit * floats
        needed = tf.reduce_sum(tf.where(remote, needed, tf.zeros_like(needed)))
        ids = tf.add_n([tf.size(b.ids, tf.int64) for b in bags])
        self._count_traffic(
            replica,
            3,
            4 * others * words + self._vector_bytes(received),
            needed,
            ids,
        )


def _beside(parts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Columns beside each other."""
    return parts[0] if len(parts) == 1 else tf.concat(parts, 1)
