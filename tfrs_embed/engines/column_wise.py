"""Tables whose columns are spread over the replicas of a strategy.

Each table, or each of its slices of columns, is on one replica. Bags of ids
travel there, and one vector for each bag comes back, whatever the number of ids
in it. All tables are exchanged together, whatever their widths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.configs.tables import FeatureSpec, TableSpec
from tfrs_embed.distribution.bag_exchange import BagExchange
from tfrs_embed.distribution.bag_messages import Piece
from tfrs_embed.engines import column_slices
from tfrs_embed.engines.collective import CollectiveEngine, Residuals
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.shard import Shard
from tfrs_embed.ops import lookup as lookup_ops
from tfrs_embed.ops import rounding
from tfrs_embed.ops.bags import BaggedIds, concat, is_wide
from tfrs_embed.ops.rounding import Rounding, widen
from tfrs_embed.ops.update import GradientContributions, add_bags
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.storage.sharded import Part


class ColumnWiseEngine(CollectiveEngine):
    """Spreads each table's columns over replicas of a strategy.

    Each replica looks up its own part of the global batch; all must call
    together. A replica that holds a table, or a slice of one, looks up all
    replicas' bags in it, and updates it by all of their gradients.

    Attributes:
        slices: each table's slices, in the order of the tables.
    """

    def __init__(
        self,
        features: Sequence[FeatureSpec],
        optimizers: dict[str, TableOptimizer | None],
        options: EngineOptions,
    ) -> None:
        super().__init__(features, optimizers, options)
        tables = [s.spec for s in self.states.values()]
        self.slices = column_slices.assign(tables, self._replicas.world)
        for s in self.slices:
            optimizer = self.optimizers[s.table.name]
            if optimizer is not None:
                column_slices.require_uncut(
                    s.table, len(s.ranks), optimizer.needs_whole_rows
                )
        self._of_table = {s.table.name: s for s in self.slices}

    def _make_shard(self, rank: int, device: str | None) -> Shard:
        mine = [t for s in self.slices if (t := s.on(rank)) is not None]
        optimizers = {t.name: self.optimizers[t.name] for t in mine}
        return Shard(mine, optimizers, self._pipelined, device)

    def _build(self) -> None:
        pieces = [
            Piece(
                i,
                feature.table.name,
                rank,
                self._of_table[feature.table.name].width,
                is_wide(feature.table.vocabulary_size),
            )
            for i, feature in enumerate(self.features)
            for rank in self._of_table[feature.table.name].ranks
        ]
        self._exchange = BagExchange(
            self._replicas,
            pieces,
            self._name,
            [str(feature) for feature in self.features],
            self._wire,
        )
        super()._build()

    def _rounding(self, rank: int, table: TableSpec) -> Rounding:
        first = self._of_table[table.name].first_column(rank)
        return rounding.of_part(table, first_column=first)

    def _parts(self, table: TableSpec) -> dict[int, Part]:
        slices, rows = self._of_table[table.name], range(table.vocabulary_size)
        parts = {}
        for rank in slices.ranks:
            first = slices.first_column(rank)
            parts[rank] = Part(rows, (first, first + slices.width))
        return parts

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
        activations = [
            b.scaled(
                concat(
                    [found[i, r] for r in self._of_table[f.table.name].ranks],
                    1,
                )
            )
            for i, (f, b) in enumerate(zip(self.features, bags, strict=True))
        ]
        # The messages aren't there if the ids are bad.
        return activations, Residuals(
            replica, list(bags), received, [received.capacity]
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
        got = self._exchange.send_gradients(replica, received, by_piece)
        contributions: dict[str, GradientContributions] = {}
        for piece, b, gradient in zip(
            self._exchange.here(replica), received.bags, got, strict=True
        ):
            add_bags(contributions, piece.table, b, gradient)
        return contributions

    def _lookup_outside(self, bags: Sequence[BaggedIds]) -> list[tf.Tensor]:
        if self._replicas.workers > 1:
            return self._refuse_outside(bags)
        self.apply_deferred()
        by_rank = dict(zip(self._replicas.ranks, self._shards, strict=True))
        return [
            concat(
                [
                    lookup_ops.combine(
                        widen(
                            *by_rank[rank].gather([feature.table.name], [b.ids])
                        ),
                        None,
                        b,
                    )
                    for rank in self._of_table[feature.table.name].ranks
                ],
                1,
            )
            for feature, b in zip(self.features, bags, strict=True)
        ]
