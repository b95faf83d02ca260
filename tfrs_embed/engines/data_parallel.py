"""Tables that every replica of a strategy has a copy of.

Lookups are local. Each replica makes the same update from all replicas'
gradients, in the same order, so that the copies stay equal bit for bit. Where
gradients are sent in fewer bits, each replica rounds its own before, and uses
the rounded ones too. Tables of one width are exchanged together: their rows are
numbered one table after the other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.distribution.replicas import bucket_of
from tfrs_embed.distribution.traffic import KEY, Collective, capacity_of
from tfrs_embed.engines.collective import CollectiveEngine, Residuals
from tfrs_embed.engines.engine import LookupCall
from tfrs_embed.engines.table_group import TableGroup, by_kind
from tfrs_embed.ops.update import GradientContributions
from tfrs_embed.storage.gathering import Gathering
from tfrs_embed.storage.initial_values import initial_blocks
from tfrs_embed.storage.sharded import Part

# The channels of a group: one for keys, one for gradients.
_CHANNELS = 2


def collectives(most: Mapping[int, float], element: int) -> list[Collective]:
    """A training step's collectives for all replicated tables.

    Args:
        most: for each width the most unique keys of any replica.
        element: the bytes of a number of a gradient.
    """
    found = [Collective("max")] if most else []
    for dim, keys in most.items():
        capacity = capacity_of(keys)
        sizes = KEY * capacity, element * dim * capacity
        found += [Collective("all_gather", size) for size in sizes]
    return found


class DataParallelEngine(CollectiveEngine):
    """Keeps a copy of each table on every replica of a strategy."""

    _copied = True

    def _prepare(self) -> None:
        trained = [t for t in self.tables if self.optimizers[t.name]]
        # A copy is numbered like the only shard of a table.
        self._groups = [
            TableGroup(tables, self.features, world=1)
            for tables in by_kind(lambda table: table.dim, trained)
        ]
        self._sizes_channel = self._replicas.allocate(1)
        self._channels = [
            self._replicas.allocate(_CHANNELS) for _ in self._groups
        ]

    def _parts(self, table: TableSpec) -> dict[int, Part]:
        whole = Part(range(table.vocabulary_size))
        return dict.fromkeys(range(self._replicas.world), whole)

    def _initial_blocks(
        self, table: TableSpec
    ) -> Iterable[tuple[int, tf.Tensor]]:
        """The initial rows of the worker of rank 0.

        An initializer without a seed gives each worker its own values.
        """
        if self._replicas.workers == 1:
            yield from initial_blocks(table)
            return
        gather = Gathering(self._replicas, f"initialize '{table.name}'")
        for start, block in initial_blocks(table):
            rows, *_ = gather(
                [
                    block.numpy() if rank == 0 else block[:0].numpy()
                    for rank in self._replicas.ranks
                ]
            )
            yield start, tf.constant(rows)

    def _lookup(
        self, replica: int, call: LookupCall
    ) -> tuple[list[tf.Tensor], Residuals]:
        bags, names = call.bags, [f.table.name for f in self.features]
        activations = self._shards[replica].store.lookup(
            names, bags, call.training, call.dtype
        )
        after = [b.ids for b in bags]
        return activations, Residuals(replica, list(bags), None, after)

    def _rows_outside(self, table: str, ids: tf.Tensor) -> tf.Tensor:
        return self._shards[0].gather([table], [ids])[0]

    def _contributions(
        self, residuals: Residuals, gradients: Sequence[tf.Tensor]
    ) -> dict[str, GradientContributions]:
        replica, sums = residuals.replica, []
        operations = self._replicas.operations(replica, training=True)
        for group in self._groups:
            routed = operations.route(group.keys(residuals.bags), 1)
            summed = operations.sum_gradients_by_row(
                group.select(gradients),
                group.select(residuals.bags),
                routed.index,
                tf.size(routed.row),
                self._wire.dtype,
            )
            sums.append((routed.row, summed))
        if not sums:
            return {}
        longest = self._replicas.max(
            replica,
            tf.stack([tf.size(rows, tf.int64) for rows, _ in sums]),
            self._sizes_channel,
        )
        contributions = {}
        for i, (group, of_group) in enumerate(
            zip(self._groups, sums, strict=True)
        ):
            of_all = self._gather_all(
                replica, self._channels[i], longest[i], *of_group
            )
            contributions.update(group.contributions(*of_all))
        return contributions

    def _gather_all(
        self,
        replica: int,
        channel: int,
        longest: tf.Tensor,
        rows: tf.Tensor,
        gradients: tf.Tensor,
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        """Gathers the gradients, [n, dim], of unique rows of all replicas.

        Args:
            replica: the local replica.
            channel: the first of the group's channels.
            longest: scalar int64, the most rows that any replica has.
            rows: [n] int64.
            gradients: of the wire's dtype.

        Returns:
            All rows, rank after rank; [n] int32, ascending, the indices of
            their gradients; and these, [m, dim] float32, without kernels summed
            by row.
        """
        capacity, bucket = bucket_of(longest)
        padding = [0, capacity - tf.size(rows)]
        rows = tf.pad(rows, [padding], constant_values=-1)
        gradients = self._wire.encode(gradients)
        gradients = tf.pad(gradients, [padding, [0, 0]])
        rows = self._replicas.gather(replica, rows, channel, bucket)
        gradients = self._replicas.gather(
            replica, gradients, channel + 1, bucket
        )
        gradients = self._wire.decode(gradients)
        # Kernels add a row's gradients in the given order with any number of
        # threads, so that all copies stay equal.
        if self._replicas.operations(replica, training=True).compiled:
            places = tf.where(rows >= 0)[:, 0]
            rows = tf.gather(rows, places)
            return rows, tf.cast(places, tf.int32), gradients
        # Rank after rank, each with unique rows: the order of terms in GPUs'
        # segment sums is random. The first sum is that of the padding.
        unique, index = tf.unique(
            tf.concat([tf.constant([-1], tf.int64), rows], 0)
        )
        total = tf.zeros([tf.size(unique), gradients.shape[1]])
        world = self._replicas.world
        for mine, sent in zip(
            tf.split(index[1:], world), tf.split(gradients, world), strict=True
        ):
            total = tf.tensor_scatter_nd_add(total, mine[:, None], sent)
        return unique[1:], tf.range(tf.size(unique) - 1), total[1:]
