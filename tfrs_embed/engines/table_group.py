"""Tables of one width, exchanged between replicas as if they were one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.configs.tables import FeatureSpec, TableSpec
from tfrs_embed.distribution import key_shards
from tfrs_embed.ops.bags import (
    BaggedIds,
    bags_of_rows,
    concat,
    num_rows,
    repeat,
    split_by_bags,
)
from tfrs_embed.ops.update import GradientContributions, JointRows

#: More rows than any table has on a shard.
MOST_ROWS = 2**41


class TableGroup:
    """The tables of one width, and the features that are looked up in them.

    A shard's rows of all tables are numbered one table after the other. Row i
    of a table is row i // world of shard (i + first) % world, the table's first
    shard being `first`.

    Args:
        tables: the tables, of one width.
        features: all features of the engine.
        world: the number of shards.
        first_shards: tables' first shards by name, 0 where there is none.
        trained: whether the tables have optimizers.

    Attributes:
        dim: the width.
        dtype: the rows' dtype.
        tables: the tables.
        features: the indices of their features among the engine's.
        trained: whether the tables have optimizers.
        keyed: whether the tables give rows to keys. Those are exchanged instead
            of rows; the tables' numbers distinguish equal keys of two tables.
        told_apart: the number of tables whose equal keys are distinguished.
        sizes: the numbers of rows of the tables on a shard; empty if they may
            grow.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        features: Sequence[FeatureSpec],
        world: int,
        first_shards: Mapping[str, int] | None = None,
        trained: bool = True,
    ) -> None:
        self.dim = tables[0].dim
        self.dtype = tf.as_dtype(tables[0].dtype)
        self.tables = tuple(tables)
        self._world = world
        self._all_features = tuple(features)
        self._first_shards = dict(first_shards or {})
        self.trained = trained
        self.keyed = tables[0].keys is not None
        self.told_apart = len(tables) if self.keyed else 1
        # Whether a hash of a key decides its shard.
        self._mixed = all(t.keys.MIXED for t in tables if t.keys is not None)
        self.sizes = (
            [] if self.keyed else [rows_per_shard(t, world) for t in tables]
        )
        # The first row of each table, by its name.
        self._first_rows: dict[str, int] = {}
        row = 0
        for i, table in enumerate(tables):
            self._first_rows[table.name] = row
            row += MOST_ROWS if self.keyed else self.sizes[i]
        self.features = tuple(
            i
            for i, f in enumerate(features)
            if f.table.name in self._first_rows
        )

    def without(self, places: Sequence[int]) -> TableGroup:
        """This group without some features, given by their indices."""
        group = copy.copy(self)
        group.features = tuple(i for i in self.features if i not in places)
        return group

    def select(self, values: Sequence[Any]) -> list[Any]:
        """Selects this group's features' values from those of all features."""
        return [values[i] for i in self.features]

    def keys(self, bags: Sequence[BaggedIds]) -> tf.Tensor:
        """Numbers the ids of the group's features.

        Args:
            bags: the bags of all features.

        Returns:
            [n] int64, feature after feature: key k is of row k // world, among
            the rows of all tables, of shard k % world. Tables with keys find
            rows by `ids_of`.
        """
        ids = [tf.cast(bags[i].ids, tf.int64) for i in self.features]
        if self.keyed:
            return self.numbers_of(concat(ids))
        tables = [self._all_features[i].table.name for i in self.features]
        turns = [self._first_shards.get(table, 0) for table in tables]
        firsts = [self._world * self._first_rows[table] for table in tables]
        keys = _turn(concat(ids), _for_each_id(turns, ids), self._world)
        first = _for_each_id(firsts, ids)
        return keys if isinstance(first, int) and not first else keys + first

    def numbers_of(self, ids: tf.Tensor) -> tf.Tensor:
        """The `keys` of ids that are keys of tables, [n] int64."""
        return key_shards.numbers_of(ids, self._world, self._mixed)

    def ids_of(self, rows: tf.Tensor, rank: int) -> tf.Tensor:
        """The ids whose `keys` are of these rows, [n] int64, of a shard."""
        numbers = rows * self._world + rank
        return key_shards.keys_of(numbers, self._world, self._mixed)

    def table_of(self, bags: Sequence[BaggedIds]) -> tf.Tensor | None:
        """The table of each of `keys`, [n] int32; None if keys are distinct."""
        if self.told_apart == 1:
            return None
        names = [table.name for table in self.tables]
        tables = [
            names.index(self._all_features[i].table.name) for i in self.features
        ]
        return _repeated(tables, [bags[i].ids for i in self.features], tf.int32)

    def number(self, rows: tf.Tensor, table_of: tf.Tensor | None) -> tf.Tensor:
        """Numbers keyed tables' rows, [n] int64, table after table."""
        if table_of is None:
            return rows
        return rows + tf.cast(table_of, tf.int64) * MOST_ROWS

    def keys_of(self, table: str, ids: np.ndarray) -> np.ndarray:
        """Numbers some of a table's ids, [n] int64, as `keys` does."""
        shard = (ids + self._first_shards.get(table, 0)) % self._world
        row = ids // self._world + self._first_rows[table]
        return row * self._world + shard

    def split(self, rows: tf.Tensor) -> tuple[list[tf.Tensor], Any]:
        """Splits rows of all tables, [n] int64, into rows of each table.

        Also returns the table of each of the n; None if there is one table.
        """
        if len(self.tables) == 1:
            return [rows], None
        firsts = tf.constant([*self._first_rows.values()], tf.int64)
        table = tf.searchsorted(firsts, rows, side="right") - 1
        rows -= tf.gather(firsts, table)
        return tf.dynamic_partition(rows, table, len(self.tables)), table

    def contributions(
        self, rows: tf.Tensor, places: tf.Tensor, gradients: tf.Tensor
    ) -> dict[str, GradientContributions]:
        """Splits row gradients into contributions by table.

        Args:
            rows: [n] int64, rows of all tables.
            places: [n] int32, ascending, the rows' indices into `gradients`.
            gradients: [m, dim] float32.
        """
        by_table, table = self.split(rows)
        if table is None:
            count = tf.shape(gradients)[0]
            bags, mine = [BaggedIds.of_rows(rows, places, count)], [gradients]
            joint = None
        else:
            # Separate gradients for each table: an update's time grows with all
            # gradients that it is given, and there may be hundreds of tables.
            bags = bags_of_rows(by_table)
            order = tf.dynamic_partition(places, table, len(by_table))
            mine = split_by_bags(
                tf.gather(gradients, tf.concat(order, 0)), bags
            )
            every = BaggedIds.of_rows(rows, places, tf.shape(gradients)[0])
            joint = JointRows(self.sizes, every, gradients)
            # The rows of tables with keys are numbered with gaps.
            joint = None if self.keyed else joint
        return {
            t.name: GradientContributions([b], [g], single=True, joint=joint)
            for t, b, g in zip(self.tables, bags, mine, strict=True)
        }


def by_kind(
    kind: Callable[[TableSpec], Any], tables: Sequence[TableSpec]
) -> list[list[TableSpec]]:
    """Groups tables by `kind`, in the order of the kinds' first use."""
    of_kind: dict[Any, list[TableSpec]] = {}
    for table in tables:
        of_kind.setdefault(kind(table), []).append(table)
    return list(of_kind.values())


def _for_each_id(values: Sequence[int], ids: Sequence[tf.Tensor]) -> Any:
    """Returns the value of each id's feature: [n] int64, or one for all ids."""
    [value, *others] = {*values}
    return _repeated(values, ids, tf.int64) if others else value


def _repeated(
    values: Sequence[int], ids: Sequence[tf.Tensor], dtype: tf.DType
) -> tf.Tensor:
    """Returns features' values for their ids, feature after feature, [n].

    Tracing an operation takes as long as numbering many ids, so there is one
    for all features.
    """
    return repeat(tf.constant(values, dtype), num_rows(ids))


def _turn(ids: tf.Tensor, by: Any, world: int) -> tf.Tensor:
    """Adds `by`, 0 to world - 1, to ids' remainders modulo world.

    The quotients stay. `by` is one number, or [n] int64 for [n] ids.
    """
    if isinstance(by, int) and not by:
        return ids
    if world & (world - 1):
        rest = tf.math.floormod(ids, world)
    else:  # A tenth of a division's time, for negative ids too.
        rest = tf.bitwise.bitwise_and(ids, tf.constant(world - 1, tf.int64))
    past = tf.cast(rest >= world - by, tf.int64)
    return ids + (by - world * past)


def rows_per_shard(table: TableSpec, world: int) -> int:
    """The number of a table's rows per shard, rounded up."""
    return -(-table.vocabulary_size // world)
