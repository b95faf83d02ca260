"""Tables whose columns are spread over the replicas of a strategy.

Each table, or each of its slices of columns, is on one replica. Bags of ids are
sent there, and one vector per bag is sent back, whatever the number of its ids.
All tables are exchanged together, whatever their widths.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.distribution.bag_exchange import BagExchange
from tfrs_embed.distribution.bag_messages import Piece
from tfrs_embed.engines import column_slices
from tfrs_embed.engines.collective import CollectiveEngine, Residuals
from tfrs_embed.engines.engine import LookupCall
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.shard import Shard
from tfrs_embed.ops.bags import concat
from tfrs_embed.ops.update import GradientContributions, add_bags
from tfrs_embed.storage.sharded import Part


class ColumnWiseEngine(CollectiveEngine):
    """Spreads each table's columns over replicas of a strategy.

    A replica that holds a slice looks up all replicas' bags in it, and updates
    it by all of their gradients.
    """

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        # The ranks of each table's slices, in the order of their columns.
        self.ranks = column_slices.assign(self.tables, self._replicas.world)
        # The same tables, as wide as a slice.
        self.slices: dict[str, TableSpec] = {}
        for table in self.tables:
            count, optimizer = (
                len(self.ranks[table.name]),
                self.optimizers[table.name],
            )
            needs = optimizer.needs_whole_rows if optimizer else None
            column_slices.require_uncut(table, count, needs)
            self.slices[table.name] = dataclasses.replace(
                table, embedding_dim=table.dim // count
            )

    def _make_shard(self, rank: int, device: str | None) -> Shard:
        mine = [t for n, t in self.slices.items() if rank in self.ranks[n]]
        optimizers = {t.name: self.optimizers[t.name] for t in mine}
        return Shard(mine, optimizers, device, self._freezing)

    def _prepare(self) -> None:
        pieces = []
        for i, feature in enumerate(self.features):
            name = feature.table.name
            for rank in self.ranks[name]:
                pieces.append(Piece(i, name, rank, self.slices[name].dim))
        names = [str(feature) for feature in self.features]
        self._exchange = BagExchange(
            self._replicas, pieces, self._name, names, self._wire
        )

    def _parts(self, table: TableSpec) -> dict[int, Part]:
        rows, width = range(table.vocabulary_size), self.slices[table.name].dim
        return {
            rank: Part(rows, (i * width, (i + 1) * width))
            for i, rank in enumerate(self.ranks[table.name])
        }

    def _lookup(
        self, replica: int, call: LookupCall
    ) -> tuple[list[tf.Tensor], Residuals]:
        bags, training = call.bags, call.training
        received = self._exchange.send_bags(replica, bags, training)
        mine = self._exchange.local_pieces(replica)
        vectors = self._shards[replica].store.lookup(
            [p.table for p in mine], received.bags, training, self._wire.dtype
        )
        found = self._exchange.send_vectors(
            replica, received, vectors, training
        )
        activations = []
        for i, (f, b) in enumerate(zip(self.features, bags, strict=True)):
            slices = [found[i, r] for r in self.ranks[f.table.name]]
            activations.append(b.scaled(concat(slices, 1)))
        # The messages don't exist if the ids are bad.
        after = [received.capacity]
        return activations, Residuals(replica, list(bags), received, after)

    def _contributions(
        self, residuals: Residuals, gradients: Sequence[tf.Tensor]
    ) -> dict[str, GradientContributions]:
        replica, received = residuals.replica, residuals.kept
        by_piece = {}
        for i, (feature, gradient, b) in enumerate(
            zip(self.features, gradients, residuals.bags, strict=True)
        ):
            ranks = self.ranks[feature.table.name]
            parts = tf.split(b.scaled(gradient), len(ranks), 1)
            for rank, part in zip(ranks, parts, strict=True):
                by_piece[i, rank] = part
        got = self._exchange.send_gradients(replica, received, by_piece)
        contributions: dict[str, GradientContributions] = {}
        for piece, b, gradient in zip(
            self._exchange.local_pieces(replica),
            received.bags,
            got,
            strict=True,
        ):
            add_bags(contributions, piece.table, b, gradient)
        return contributions

    def _rows_outside(self, table: str, ids: tf.Tensor) -> tf.Tensor:
        by_rank = dict(zip(self._replicas.ranks, self._shards, strict=True))
        return concat(
            [by_rank[r].gather([table], [ids])[0] for r in self.ranks[table]], 1
        )
