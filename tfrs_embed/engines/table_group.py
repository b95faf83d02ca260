"""Tables of one width, exchanged between replicas as if they were one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.configs.tables import FeatureSpec, TableSpec
from tfrs_embed.ops.bags import (
    BaggedIds,
    bag_of_id,
    bags_of_rows,
    concat,
    num_rows,
    split_by_bags,
)
from tfrs_embed.ops.update import GradientContributions

#: More than a shard's rows of any table.
MOST_ROWS = 2**41


class TableGroup:
    """The tables of one width, and the features that are looked up in them.

    The tables' rows on a shard are numbered one table after the other. Row i of
    a table is row i // world of shard (i + first) % world, the table's first
    shard being `first`.

    Args:
        tables: the tables.
        features: all features of the engine.
        world: the number of shards.
        first_shards: tables' first shards by their names; 0 where none is
            given.
        keyed: whether the tables give rows to keys, which are exchanged as they
            are: equal ones of two tables are told apart by the tables' numbers.

    Attributes:
        dim: the width.
        dtype: the rows' dtype.
        tables: the tables.
        features: the places of their features among the engine's.
        told_apart: how many tables' keys are told apart by their numbers.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        features: Sequence[FeatureSpec],
        world: int,
        first_shards: Mapping[str, int] | None = None,
        keyed: bool = False,
    ) -> None:
        self.dim = tables[0].dim
        self.dtype = tf.as_dtype(tables[0].dtype)
        self.tables = tuple(tables)
        self._world = world
        self._all_features = tuple(features)
        self._first_shards = dict(first_shards or {})
        self._keyed = keyed
        self.told_apart = len(tables) if keyed else 1
        # The first row of each table, by its name.
        self._first_rows: dict[str, int] = {}
        row = 0
        for table in tables:
            self._first_rows[table.name] = row
            # Tables of keys may grow.
            row += MOST_ROWS if keyed else rows_per_shard(table, world)
        self.features = tuple(
            i
            for i, f in enumerate(features)
            if f.table.name in self._first_rows
        )

    def without(self, places: Sequence[int]) -> TableGroup:
        """This group, without the features at some places of the engine's."""
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
            the rows of all tables, of shard k % world.
        """
        ids = [tf.cast(bags[i].ids, tf.int64) for i in self.features]
        if self._keyed:
            return concat(ids)
        tables = [self._all_features[i].table.name for i in self.features]
        turns = [self._first_shards.get(table, 0) for table in tables]
        firsts = [self._world * self._first_rows[table] for table in tables]
        if len(ids) == 1:
            [turn], [first], [keys] = turns, firsts, ids
        else:
            # All features at once: each operation takes as long to trace as
            # many ids do to number.
            splits = tf.cumsum(tf.concat([[0], num_rows(ids)], 0))
            feature = bag_of_id(splits)
            keys = tf.concat(ids, 0)
            turn, first = (
                tf.gather(tf.constant(values, tf.int64), feature)
                if any(values)
                else 0
                for values in (turns, firsts)
            )
        keys = _turn(keys, turn, self._world)
        return keys if isinstance(first, int) and not first else keys + first

    def table_of(self, bags: Sequence[BaggedIds]) -> tf.Tensor | None:
        """The table of each of `keys`, [n] int32, if it tells them apart."""
        if self.told_apart == 1:
            return None
        numbers = {table.name: i for i, table in enumerate(self.tables)}
        tables = [
            numbers[self._all_features[i].table.name] for i in self.features
        ]
        splits = tf.concat(
            [[0], num_rows([bags[i].ids for i in self.features])], 0
        )
        return tf.gather(tables, bag_of_id(tf.cumsum(splits)))

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
        """Splits rows of all tables into rows of each.

        Args:
            rows: [n] int64.

        Returns:
            Each table's own rows, and the table of each of the n, or None if
            there is one table.
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
        """Gradient contributions to each table's rows.

        Args:
            rows: [n] int64, rows of all tables.
            places: [n] int32, ascending, the places of their gradients.
            gradients: [m, dim] float32.

        Returns:
            Each table's, by its name.
        """
        by_table, table = self.split(rows)
        if table is None:
            count = tf.shape(gradients)[0]
            bags, mine = [BaggedIds.of_rows(rows, places, count)], [gradients]
        else:
            # Each table has its own gradients: what updates it takes time for
            # all that it is given, and there may be hundreds.
            bags = bags_of_rows(by_table)
            order = tf.dynamic_partition(places, table, len(by_table))
            mine = split_by_bags(
                tf.gather(gradients, tf.concat(order, 0)), bags
            )
        return {
            t.name: GradientContributions([b], [g], single=True)
            for t, b, g in zip(self.tables, bags, mine, strict=True)
        }


def by_kind(
    kind: Callable[[TableSpec], Any],
    tables: Sequence[TableSpec],
    features: Sequence[FeatureSpec],
    world: int,
    first_shards: Mapping[str, int] | None = None,
    keyed: bool = False,
) -> list[TableGroup]:
    """Groups tables, in the order of the kinds' first use.

    Args:
        kind: returns a table's kind; tables of one have one width.
        tables: the tables.
        features: all features of the engine.
        world: the number of shards.
        first_shards: tables' first shards by their names.
        keyed: whether the tables give rows to keys.
    """
    of_kind: dict[Any, list[TableSpec]] = {}
    for table in tables:
        of_kind.setdefault(kind(table), []).append(table)
    return [
        TableGroup(mine, features, world, first_shards, keyed)
        for mine in of_kind.values()
    ]


def _turn(ids: tf.Tensor, by: Any, world: int) -> tf.Tensor:
    """Ids whose quotients are the same, and whose remainders are further on.

    Args:
        ids: [n] int64.
        by: the number that is added to a remainder, below world: of each id,
            [n] int64, or of all.
        world: the number that the ids are divided by.
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
    """The rows of a table on each shard; the last may be of no table row."""
    return -(-table.vocabulary_size // world)
