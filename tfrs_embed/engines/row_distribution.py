"""Sends ids to the shards of their rows, and rows back.

    ids -> RowInput -> keys of a shard -> RowLookup -> rows -> RowOutput

Gradients take the same way back. `RowLookup` is what a shard does with the keys
that replicas ask it for: a table whose keys come and go has one of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.distribution import hot_rows
from tfrs_embed.distribution.hot_rows import HotKeys
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.distribution.row_exchange import (
    GRADIENTS,
    ROWS,
    Received,
    RowExchange,
)
from tfrs_embed.distribution.wire import Wire
from tfrs_embed.engines.hot_rows import HotRows
from tfrs_embed.engines.shard import Shard
from tfrs_embed.engines.table_group import TableGroup
from tfrs_embed.ops.bags import BaggedIds, split_by_bags
from tfrs_embed.ops.messages import Route
from tfrs_embed.ops.update import GradientContributions


class Asked(NamedTuple):
    """A replica's keys, and those that it was asked for.

    What belongs to a group of tables is in a mapping, by the group's number.

    Attributes:
        groups: the groups, with those of their features whose rows travel.
        routes: where the replica's keys are sent.
        hot: the keys of hot rows, which are not sent, of the groups that have
            such rows.
        received: what the replica was asked for; empty before keys are sent.
        positions: for each feature of a group [n] int32, the places of its ids'
            rows among the answers; empty before rows are sent.
    """

    groups: dict[int, TableGroup]
    routes: dict[int, Route]
    hot: dict[int, HotKeys]
    received: Mapping[int, Received] = {}
    positions: Mapping[int, Sequence[tf.Tensor]] = {}


class RowLookup:
    """Reads the rows of a shard that replicas ask for.

    Args:
        shards: those of this process's replicas.
        wire: what float32 rows are sent as.
    """

    def __init__(self, shards: Sequence[Shard], wire: Wire) -> None:
        self._shards = shards
        self._wire = wire

    def keys(self, ids: tf.Tensor) -> tf.Tensor:
        """The keys of ids, [n] int64: of row key // world, shard key % world.

        A group numbers its tables' ids before; see `TableGroup.keys`.
        """
        return ids

    def look_up(
        self, replica: int, asked: Asked, training: bool
    ) -> tuple[Asked, dict[int, tf.Tensor]]:
        """Finds and reads rows.

        Args:
            replica: the local replica whose shard it is.
            asked: the keys that it was asked for.
            training: whether the tables are about to be updated.

        Returns:
            `asked` with the rows of the keys received; and these rows, [n, dim]
            for each group, of the dtype that they are sent as.
        """
        return asked, {
            i: self.read(replica, asked.groups[i], received.rows, training)
            for i, received in asked.received.items()
        }

    def read(
        self, replica: int, group: TableGroup, rows: tf.Tensor, training: bool
    ) -> tf.Tensor:
        """Rows of a group, [n, dim], of the dtype that they are sent as."""
        by_table, table = group.split(rows)
        found = self._shards[replica].gather(
            [t.name for t in group.tables],
            by_table,
            training,
            self._wire.of_rows(group.dtype).dtype,
        )
        if table is None:
            return found[0]
        places = tf.dynamic_partition(
            tf.range(tf.size(rows)), table, len(by_table)
        )
        return tf.dynamic_stitch(places, found)

    def contributions(
        self, replica: int, asked: Asked, gradients: Mapping[int, tf.Tensor]
    ) -> dict[str, GradientContributions]:
        """The contributions of rows' gradients to this replica's shard.

        Args:
            replica: the local replica whose shard it is.
            asked: what `look_up` returned.
            gradients: the rows' gradients.

        Returns:
            The contributions by table.
        """
        contributions = {}
        for i, received in asked.received.items():
            rows = tf.gather(received.rows, received.places)
            contributions.update(
                asked.groups[i].contributions(
                    rows, received.places, gradients[i]
                )
            )
        return contributions

    def read_outside(
        self, replica: int, table: str, rows: tf.Tensor
    ) -> tf.Tensor:
        """Rows, [n, dim], of a table's keys on a shard, outside of replicas."""
        return self._shards[replica].gather([table], [rows])[0]


class RowInput:
    """Sends ids to the shards of their rows; those of hot rows stay.

    Args:
        exchange: the exchange of the groups of tables.
        groups: the groups.
        hot: the hot rows of their tables.
        lookup: what the shards do with keys.
    """

    def __init__(
        self,
        exchange: RowExchange,
        groups: Sequence[TableGroup],
        hot: HotRows,
        lookup: RowLookup,
    ) -> None:
        self._exchange = exchange
        self._groups = groups
        self._hot = hot
        self._lookup = lookup

    def begin(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        without: Sequence[int],
        training: bool,
    ) -> Asked:
        """Finds where ids are to be sent.

        Args:
            replica: the local replica.
            bags: each feature's bags; ids may be out of range.
            without: the places of features whose rows don't travel.
            training: whether this is part of a training step.

        Returns:
            The keys of the other features.
        """
        asked = Asked({}, {}, {})
        for i, every in enumerate(self._groups):
            group = every.without(without)
            if not group.features:
                continue
            route = self._exchange.route(
                replica,
                self._lookup.keys(group.keys(bags)),
                training,
                group.table_of(bags),
                group.told_apart,
            )
            if (copies := self._hot.group(i)) is not None:
                route, asked.hot[i] = hot_rows.split(
                    route, copies.keys[replica]
                )
            asked.groups[i], asked.routes[i] = group, route
        return asked

    def send(
        self, replica: int, asked: Asked, longest: tf.Tensor, training: bool
    ) -> Asked:
        """Sends keys, and receives those of others.

        Args:
            replica: the local replica.
            asked: what `begin` returned.
            longest: the largest of all replicas' `RowExchange.sizes`.
            training: whether this is part of a training step.
        """
        received = self._exchange.send_keys(
            replica, asked.routes, longest, training
        )
        return asked._replace(received=received)


class RowOutput:
    """Sends rows to where they are wanted, and their gradients back.

    Args:
        exchange: the exchange of the groups of tables.
        hot: the hot rows of their tables.
        lookup: reads copies of hot rows.
        replicas: the replicas.
        wire: what gradients are sent as.
    """

    def __init__(
        self,
        exchange: RowExchange,
        hot: HotRows,
        lookup: RowLookup,
        replicas: Replicas,
        wire: Wire,
    ) -> None:
        self._exchange = exchange
        self._hot = hot
        self._lookup = lookup
        self._replicas = replicas
        self._wire = wire

    def send(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        asked: Asked,
        rows: Mapping[int, tf.Tensor],
        training: bool,
    ) -> tuple[Asked, dict[int, tf.Tensor]]:
        """Answers with rows, and makes vectors of the answers.

        Args:
            replica: the local replica.
            bags: each feature's bags.
            asked: what `RowLookup.look_up` returned.
            rows: the rows that it returned.
            training: whether the tables are about to be updated.

        Returns:
            `asked` with its `positions`, and features' vectors by the features'
            places.
        """
        operations = self._replicas.operations(replica, training)
        answers = self._exchange.send(replica, asked.received, rows, ROWS)
        activations: dict[int, tf.Tensor] = {}
        positions = {}
        for i, group in asked.groups.items():
            answer, position = answers[i], asked.received[i].position
            if i in asked.hot:
                answer, position = self._add_copies(
                    replica, i, asked.hot[i], answer, position, training
                )
            mine = group.select(bags)
            index = tf.gather(position, asked.routes[i].index)
            positions[i] = split_by_bags(index, mine)
            vectors = operations.combine(answer, positions[i], mine)
            activations.update(zip(group.features, vectors, strict=True))
        return asked._replace(positions=positions), activations

    def _add_copies(
        self,
        replica: int,
        number: int,
        hot: HotKeys,
        rows: tf.Tensor,
        position: tf.Tensor,
        training: bool,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Adds hot rows to those that came back.

        Args:
            replica: the local replica.
            number: the group's number.
            hot: its keys of hot rows.
            rows: [m, dim], those that came back, in the dtype that they were
                sent as, to which copies are rounded too.
            position: [u] int32, the places there of the keys that were sent.
            training: whether the tables are about to be updated.

        Returns:
            All rows, and the places of all unique keys' rows.
        """
        of_group = self._hot.group(number)
        assert of_group is not None
        places = tf.cast(hot.places, tf.int64)
        copies = self._lookup.read(replica, of_group.copies, places, training)
        behind = tf.shape(rows)[0] + tf.range(tf.size(places))
        position = tf.gather(tf.concat([position, behind], 0), hot.order)
        return tf.concat([rows, copies], 0), position

    def send_gradients(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        asked: Asked,
        gradients: Sequence[tf.Tensor],
    ) -> tuple[dict[int, tf.Tensor], dict[str, GradientContributions]]:
        """Sends gradients to the rows' shards.

        Args:
            replica: the local replica.
            bags: each feature's bags.
            asked: what `send` returned.
            gradients: each feature's vectors' gradients.

        Returns:
            The gradients of the rows that the replica was asked for, float32;
            and the contributions to copies of hot rows, those of all replicas.
        """
        operations = self._replicas.operations(replica, training=True)
        sums, of_copies = {}, {}
        for i, group in asked.groups.items():
            hot = asked.hot.get(i)
            count = asked.received[i].num_rows
            sums[i] = operations.sum_gradients_by_row(
                group.select(gradients),
                group.select(bags),
                tf.concat(asked.positions[i], 0),
                count if hot is None else count + tf.size(hot.places),
                # Those of copies are added up as float32.
                self._wire.dtype if hot is None else tf.float32,
            )
            if hot is not None:
                of_copies[i] = hot, sums[i][count:]
                sums[i] = sums[i][:count]
        got = self._exchange.send(replica, asked.received, sums, GRADIENTS)
        return got, self._hot.contributions(replica, of_copies)
