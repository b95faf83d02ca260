"""Copies of the frequent rows of tables that are sharded by row.

Each replica has a copy of a table's hot rows and of their slots, beside its
shard, and looks them up there without communication. One all-reduce sums their
gradients over all replicas, so that all copies stay equal bit for bit. Then the
rows' owners write the updated copies to their shards. A shard therefore always
has all of its rows, and readers of a table need not know of copies.

A copy is a table of its own in its shard. Copies of one width are numbered one
table after the other, each in the order of its rows' keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.rows import scatter
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.distribution.hot_rows import HotKeys, num_floats
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.engines.shard import Shard
from tfrs_embed.engines.table_group import TableGroup
from tfrs_embed.ops.update import PARAMETERS, GradientContributions
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.storage.table_state import TableState


@dataclasses.dataclass(frozen=True, eq=False)
class HotTable:
    """A table's hot rows.

    Attributes:
        table: the table.
        copies: the table of their copies.
        ids: [n] int64, the row of each copy.
        owners: [n] int64, the ranks that have these rows in their shards.
        rows: [n] int64, the rows' numbers in these shards.
    """

    table: TableSpec
    copies: TableSpec
    ids: np.ndarray
    owners: np.ndarray
    rows: np.ndarray

    def write(
        self, copies: Iterable[tf.Variable], start: int, rows: tf.Tensor
    ) -> None:
        """Writes rows of the table, [n, dim] from row `start`, to copies.

        `copies` are variables of the copies, or of a slot of theirs.
        """
        numbers = self.ids - start
        mine = np.flatnonzero((numbers >= 0) & (numbers < rows.shape[0]))
        if not mine.size:
            return
        with tf.device("CPU:0"):
            found = tf.gather(rows, numbers[mine])
        for copy in copies:
            scatter(copy, tf.constant(mine), found)


class _Group:
    """The hot rows of the tables of a group.

    Attributes:
        copies: their copies, of which this group numbers the rows.
        trained: [m] int64, the trained ones of these rows.
        keys: for each local replica [n] int64, ascending: the rows' keys.
    """

    def __init__(
        self,
        group: TableGroup,
        tables: Sequence[HotTable],
        optimizers: Mapping[str, TableOptimizer | None],
        devices: Sequence[str | None],
    ) -> None:
        numbers = [len(t.ids) for t in tables]
        trained = [optimizers[t.table.name] is not None for t in tables]
        self.copies = TableGroup([t.copies for t in tables], (), 1)
        self.trained = np.flatnonzero(np.repeat(trained, numbers))
        keys = np.concatenate(
            [group.keys_of(t.table.name, t.ids) for t in tables]
        )
        self.keys = []
        for device in devices:
            with tf.device(device):
                self.keys.append(tf.constant(keys))


class HotRows:
    """The copies of hot rows of an engine's tables.

    `first_ranks` has for each table the rank that has its row 0.

    Attributes:
        tables: the tables that have hot rows, by name.
        groups: the groups of tables that have some, by number.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        optimizers: Mapping[str, TableOptimizer | None],
        first_ranks: Mapping[str, int],
        world: int,
    ) -> None:
        self.tables: dict[str, HotTable] = {}
        self._optimizers = optimizers
        self.groups: dict[int, _Group] = {}
        names = {t.name for t in tables}
        for table in tables:
            if isinstance(table.hot_rows, tuple) and table.hot_rows:
                first = first_ranks[table.name]
                hot = _hot_table(table, first, world, names)
                names.add(hot.copies.name)
                self.tables[table.name] = hot

    def build(
        self,
        replicas: Replicas,
        shards: Sequence[Shard],
        groups: Sequence[TableGroup],
    ) -> None:
        """Prepares for lookups and updates; all workers must together."""
        if not self.tables:
            return
        self._replicas = replicas
        self._channel = replicas.allocate(1)
        for i, group in enumerate(groups):
            mine = [
                self.tables[t.name]
                for t in group.tables
                if t.name in self.tables
            ]
            if mine:
                self.groups[i] = _Group(
                    group, mine, self._optimizers, replicas.devices
                )
        for hot in self.tables.values():
            for rank, shard in zip(replicas.ranks, shards, strict=True):
                rows = np.where(hot.owners == rank, hot.rows, -1)
                shard.own(hot.copies.name, hot.table.name, rows)

    def fill(self, state: TableState, shards: Sequence[Shard]) -> None:
        """Copies rows of a table from their owners.

        An initializer without a seed gives each worker values of its own.
        """
        hot = self.tables.get(state.spec.name)
        if hot is None:
            return
        rows = state.saved[PARAMETERS].collect_rows(hot.ids)
        for shard in shards:
            with tf.device(shard.device):
                copies = shard.store.variables(hot.copies.name)
                copies[PARAMETERS].assign(rows)

    @property
    def floats(self) -> int:
        """The numbers that a training step sums over replicas."""
        return sum(
            num_floats(len(group.trained), group.copies.dim)
            for group in self.groups.values()
        )

    def contributions(
        self, replica: int, sums: Mapping[int, tuple[HotKeys, tf.Tensor]]
    ) -> dict[str, GradientContributions]:
        """Sums the gradients of copies over all replicas.

        Args:
            replica: the local replica.
            sums: by group, the hot keys of the replica, and its own gradients'
                sums of these, [h, dim] float32.
        """
        if not self.floats:
            return {}
        groups = {i: g for i, g in self.groups.items() if len(g.trained)}
        parts, sizes = [], []
        for i, group in groups.items():
            keys, gradients = sums[i]
            number = len(group.keys[0])
            for values in (gradients, tf.ones([tf.size(keys.places), 1])):
                # All hot rows, so that all replicas have one shape.
                total = tf.scatter_nd(
                    keys.places[:, None], values, [number, values.shape[1]]
                )
                if len(group.trained) < number:
                    total = tf.gather(total, group.trained)
                parts.append(tf.reshape(total, [-1]))
                sizes.append(len(group.trained) * values.shape[1])
        total = self._replicas.sum(replica, tf.concat(parts, 0), self._channel)
        parts = tf.split(total, sizes)
        contributions = {}
        for place, group in enumerate(groups.values()):
            gradients, lookups = parts[2 * place : 2 * place + 2]
            # Rows that no replica looked up keep their slots.
            touched = rows = tf.where(lookups > 0)[:, 0]
            if len(group.trained) < len(group.keys[0]):
                rows = tf.gather(group.trained, touched)
            contributions.update(
                group.copies.contributions(
                    rows,
                    tf.cast(touched, tf.int32),
                    tf.reshape(gradients, [-1, group.copies.dim]),
                )
            )
        return contributions


def _hot_table(
    table: TableSpec, first: int, world: int, names: set[str]
) -> HotTable:
    ids = np.asarray(table.hot_rows, np.int64)
    owners, rows = (ids + first) % world, ids // world
    order = np.lexsort([owners, rows])  # As keys are: see TableGroup.
    name = f"{table.name}/hot_rows"
    while name in names:
        name += "_"
    copies = dataclasses.replace(
        table, name=name, vocabulary_size=len(ids), hot_rows=(), storage=None
    )
    return HotTable(table, copies, ids[order], owners[order], rows[order])
