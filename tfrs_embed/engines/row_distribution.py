"""Sends ids to the shards of their rows, and rows back.

    ids -> RowInput -> keys of a shard -> RowLookup -> rows -> RowOutput

Gradients take the same way back. `RowLookup` reads the rows of received keys,
after it has found them where tables have `DynamicKeys`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.distribution import hot_rows
from tfrs_embed.distribution.hot_rows import HotKeys
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.distribution.row_exchange import (
    COUNTS,
    GRADIENTS,
    ROWS,
    ReceivedKeys,
    RowExchange,
)
from tfrs_embed.distribution.wire import Wire
from tfrs_embed.engines.hot_row_copies import HotRows
from tfrs_embed.engines.shard import Shard
from tfrs_embed.engines.table_group import TableGroup
from tfrs_embed.ops.bags import BaggedIds, split_by_bags
from tfrs_embed.ops.checks import Consensus
from tfrs_embed.ops.messages import Route
from tfrs_embed.ops.update import GradientContributions
from tfrs_embed.storage.row_store import IdsOfTables, Located


class RowRequest(NamedTuple):
    """A replica's lookup: its keys, and the keys that it received.

    Mappings have a value for each group of tables, by the group's number.

    Attributes:
        replica: the local replica.
        bags: the bags of all features.
        training: whether this is part of a training step.
        groups: the groups, with those features whose rows are exchanged.
        routes: the shards of the replica's keys.
        hot: the keys of hot rows, which are not sent.
        received: the keys received; empty before keys are sent.
        positions: for each feature of a group [n] int32, its ids' rows among
            the answers; empty before rows are sent.
        located: the rows of the received keys of groups of tables with keys;
            None: there are none, or they are not found yet.
    """

    replica: int
    bags: Sequence[BaggedIds]
    training: bool
    groups: dict[int, TableGroup]
    routes: dict[int, Route]
    hot: dict[int, HotKeys]
    received: Mapping[int, ReceivedKeys] = {}
    positions: Mapping[int, Sequence[tf.Tensor]] = {}
    located: Located | None = None

    @property
    def keyed(self) -> list[int]:
        """The numbers of groups of tables with keys."""
        return [i for i, group in self.groups.items() if group.keyed]


@dataclasses.dataclass
class RowLookup:
    """Finds and reads the rows of received keys, on this process's shards.

    Attributes:
        shards: the shards of local replicas.
        replicas: the replicas.
        exchange: the exchange that has sent the keys.
        wire: the wire of rows.
        agree: returns the consensus on giving rows to new keys.
    """

    shards: Sequence[Shard]
    replicas: Replicas
    exchange: RowExchange
    wire: Wire
    agree: Callable[[], Consensus | None]

    def lookup(
        self, asked: RowRequest
    ) -> tuple[RowRequest, dict[int, tf.Tensor]]:
        """Finds and reads the rows of received keys.

        Returns `asked` with the rows' numbers; and each group's rows, [n, dim],
        of the dtype that they are sent as.
        """
        if asked.keyed:
            asked = self._locate(asked)
        rows = {
            i: self.read(asked, asked.groups[i], received.rows)
            for i, received in asked.received.items()
        }
        if asked.located is not None:
            checked = self.shards[asked.replica].store.check(
                asked.located, [rows[i] for i in asked.keyed]
            )
            rows.update(zip(asked.keyed, checked, strict=True))
        return asked, rows

    def _locate(self, asked: RowRequest) -> RowRequest:
        """Finds keys' rows; reserves some for new keys in a training step."""
        replica, training = asked.replica, asked.training
        shard, received = self.shards[replica], {**asked.received}
        counts: Mapping[int, tf.Tensor] = {}
        mine = [i for i in asked.keyed if training and asked.groups[i].trained]
        if mine:
            counts = self.exchange.send(
                replica,
                {i: received[i] for i in mine},
                {i: _occurrences(asked.routes[i]) for i in mine},
                COUNTS,
            )
        rank = self.replicas.ranks[replica]
        located = shard.store.locate(
            [
                IdsOfTables(
                    [t.name for t in asked.groups[i].tables],
                    asked.groups[i].ids_of(received[i].rows, rank),
                    received[i].table_of,
                    counts.get(i),
                )
                for i in asked.keyed
            ],
            training,
            shard.step,
            self.agree() if mine else None,
        )
        for i, rows in zip(asked.keyed, located.rows, strict=True):
            numbers = asked.groups[i].number(rows, received[i].table_of)
            received[i] = received[i]._replace(rows=numbers)
        return asked._replace(received=received, located=located)

    def read(
        self, asked: RowRequest, group: TableGroup, rows: tf.Tensor
    ) -> tf.Tensor:
        """Rows of a group, [n, dim], of the dtype that they are sent as."""
        shard = self.shards[asked.replica]
        names = [t.name for t in group.tables]
        dtype = self.wire.of_rows(group.dtype).dtype
        if asked.training and len(names) > 1:
            joint = shard.store.read_joint(names, group.sizes, rows, dtype)
            if joint is not None:
                return joint
        by_table, table = group.split(rows)
        found = shard.gather(names, by_table, asked.training, dtype)
        if table is None:
            return found[0]
        places = tf.dynamic_partition(
            tf.range(tf.size(rows)), table, len(by_table)
        )
        return tf.dynamic_stitch(places, found)

    def contributions(
        self, asked: RowRequest, gradients: Mapping[int, tf.Tensor]
    ) -> dict[str, GradientContributions]:
        """Contributions of rows' gradients to the replica's shard, by table."""
        if asked.located is not None:
            asked = self._commit(asked, gradients)
        contributions = {}
        for i, received in asked.received.items():
            rows = tf.gather(received.rows, received.places)
            contributions.update(
                asked.groups[i].contributions(
                    rows, received.places, gradients[i]
                )
            )
        return contributions

    def _commit(
        self, asked: RowRequest, gradients: Mapping[int, tf.Tensor]
    ) -> RowRequest:
        """Gives new keys their rows; leaves out keys that get none."""
        store, received = self.shards[asked.replica].store, {**asked.received}
        assert asked.located is not None
        rows = store.commit(asked.located, [*gradients.values()])
        for i, committed in zip(asked.keyed, rows, strict=True):
            group, each = asked.groups[i], received[i]
            if not group.trained:
                del received[i]
                continue
            have_rows = tf.gather(committed, each.places) != store.trash
            received[i] = each._replace(
                rows=group.number(committed, each.table_of),
                places=tf.gather(each.places, tf.where(have_rows)[:, 0]),
            )
        return asked._replace(received=received)

    def read_outside(
        self, group: TableGroup, rank: int, table: str, rows: tf.Tensor
    ) -> tf.Tensor:
        """Rows, [n, dim], of a table's keys on a shard, outside of replicas."""
        shard = self.shards[self.replicas.ranks.index(rank)]
        if not group.keyed:
            return shard.gather([table], [rows])[0]
        ids = IdsOfTables([table], group.ids_of(rows, rank))
        located = shard.store.locate([ids], training=False)
        vectors = shard.gather([table], located.rows)
        return shard.store.check(located, vectors)[0]


def _occurrences(routed: Route) -> tf.Tensor:
    """How often each unique key of a replica occurs, [u] int64."""
    return tf.math.unsorted_segment_sum(
        tf.ones_like(routed.index, tf.int64), routed.index, tf.size(routed.row)
    )


@dataclasses.dataclass
class RowInput:
    """Sends ids to the shards of their rows; keys of hot rows stay."""

    exchange: RowExchange
    groups: Sequence[TableGroup]
    hot: HotRows

    def begin(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        without: Sequence[int],
        training: bool,
    ) -> RowRequest:
        """Finds the shards of ids, which may be invalid.

        Features at the indices `without` are not exchanged by rows.
        """
        asked = RowRequest(replica, bags, training, {}, {}, {})
        for i, every in enumerate(self.groups):
            group = every.without(without)
            if not group.features:
                continue
            route = self.exchange.route(
                replica,
                group.keys(bags),
                training,
                group.table_of(bags),
                group.told_apart,
            )
            if i in self.hot.groups:
                copies = self.hot.groups[i].keys[replica]
                route, asked.hot[i] = hot_rows.split(route, copies)
            asked.groups[i], asked.routes[i] = group, route
        return asked

    def send(self, asked: RowRequest, longest: tf.Tensor) -> RowRequest:
        """Sends keys, and receives the keys of other replicas.

        `longest` is the maximum of all replicas' `RowExchange.sizes`.
        """
        received = self.exchange.send_keys(
            asked.replica, asked.routes, longest, asked.training
        )
        return asked._replace(received=received)


@dataclasses.dataclass
class RowOutput:
    """Sends rows to the replicas that asked, and their gradients back."""

    exchange: RowExchange
    hot: HotRows
    lookup: RowLookup
    replicas: Replicas
    wire: Wire

    def send(
        self, asked: RowRequest, rows: Mapping[int, tf.Tensor]
    ) -> tuple[RowRequest, dict[int, tf.Tensor]]:
        """Answers with rows, and combines the answers to this replica.

        Returns `asked` with its `positions`, and the features' vectors by
        index.
        """
        replica, bags = asked.replica, asked.bags
        operations = self.replicas.operations(replica, asked.training)
        answers = self.exchange.send(replica, asked.received, rows, ROWS)
        activations: dict[int, tf.Tensor] = {}
        positions = {}
        for i, group in asked.groups.items():
            answer, position = answers[i], asked.received[i].position
            if i in asked.hot:
                # Copies are rounded like rows that are sent.
                hot, group_of_copies = asked.hot[i], self.hot.groups[i].copies
                places = tf.cast(hot.places, tf.int64)
                copies = self.lookup.read(asked, group_of_copies, places)
                behind = tf.shape(answer)[0] + tf.range(tf.size(places))
                position = tf.concat([position, behind], 0)
                position = tf.gather(position, hot.order)
                answer = tf.concat([answer, copies], 0)
            mine = group.select(bags)
            index = tf.gather(position, asked.routes[i].index)
            positions[i] = split_by_bags(index, mine)
            vectors = operations.combine(answer, positions[i], mine)
            activations.update(zip(group.features, vectors, strict=True))
        return asked._replace(positions=positions), activations

    def send_gradients(
        self, asked: RowRequest, gradients: Sequence[tf.Tensor]
    ) -> tuple[dict[int, tf.Tensor], dict[str, GradientContributions]]:
        """Sends gradients to the rows' shards.

        Returns the gradients of the keys that this replica received, float32;
        and the contributions to copies of hot rows, of all replicas.
        """
        replica, bags = asked.replica, asked.bags
        operations = self.replicas.operations(replica, training=True)
        sums, of_copies = {}, {}
        for i, group in asked.groups.items():
            hot = asked.hot.get(i)
            count = asked.received[i].num_rows
            sums[i] = operations.sum_gradients_by_row(
                group.select(gradients),
                group.select(bags),
                tf.concat(asked.positions[i], 0),
                count if hot is None else count + tf.size(hot.places),
                # Gradients of copies are summed in float32.
                self.wire.dtype if hot is None else tf.float32,
            )
            if hot is not None:
                of_copies[i] = hot, sums[i][count:]
                sums[i] = sums[i][:count]
        got = self.exchange.send(replica, asked.received, sums, GRADIENTS)
        return got, self.hot.contributions(replica, of_copies)
