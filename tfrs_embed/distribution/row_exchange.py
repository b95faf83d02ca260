"""The exchange of keys, rows and gradients of all groups of tables.

In one stage, every replica has a message for every other. In two stages, the
replicas of a host collect what they want of other hosts, each for those of the
same place on all hosts: repeated keys of a host travel between hosts once, and
messages are fewer and longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.distribution.exchange import (
    COUNTS,
    GRADIENTS,
    ROWS,
    Collected,
    Exchange,
    Received,
)
from tfrs_embed.distribution.exchange_kind import first_stage
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.distribution.wire import Wire
from tfrs_embed.ops import backend
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.messages import Route

#: The size of the groups of the first stage; None: `first_stage` says it.
GROUP_SIZE: int | None = None


class RowExchange:
    """Exchanges keys, rows and gradients of groups of tables, in one stage.

    What belongs to a group is in a mapping by the group's number. All replicas
    must call together.

    Args:
        replicas: those that exchange: all, or the groups of some.
        groups: for each group the width of its tables, and what their rows are
            sent as.
        wire: what gradients are sent as.

    Attributes:
        num_sizes: how many sizes a replica has.
    """

    def __init__(
        self,
        replicas: Replicas,
        groups: Sequence[tuple[int, Wire]],
        wire: Wire,
    ) -> None:
        self._replicas = replicas
        self._groups = groups
        self._wire = wire
        self.num_sizes = len(groups)
        self._exchanges = [Exchange(replicas) for _ in groups]

    def route(
        self,
        replica: int,
        keys: tf.Tensor,
        training: bool,
        table_of: tf.Tensor | None = None,
        tables: int = 1,
    ) -> Route:
        """Finds where keys are sent first, as `messages.route` does."""
        operations = backend.of(self._replicas.devices[replica], training)
        return operations.route(keys, self._replicas.world, table_of, tables)

    def sizes(self, routes: Mapping[int, Route]) -> list[tf.Tensor]:
        """The longest of a replica's messages, of which all need the largest.

        Args:
            routes: the replica's keys.

        Returns:
            `num_sizes` scalars int64, whatever the groups.
        """
        sizes = [tf.constant(0, tf.int64)] * self.num_sizes
        for i, routed in routes.items():
            sizes[i] = self._exchanges[i].longest(routed)
        return sizes

    def send_keys(
        self,
        replica: int,
        routes: Mapping[int, Route],
        longest: tf.Tensor,
        training: bool,
    ) -> dict[int, Received]:
        """Sends keys to their shards.

        Args:
            replica: the local replica that calls.
            routes: the replica's keys.
            longest: int64, the largest of all replicas' `sizes`; there may be
                more behind them.
            training: whether this is part of a training step.

        Returns:
            What the others asked of this replica.
        """
        if self._replicas.world > 1:
            rank = self._replicas.ranks[replica]
            for i, routed in routes.items():
                dim, wire = self._groups[i]
                size = 8 + (wire.size + self._wire.size) * dim
                mine = tf.reduce_sum(routed.counts[rank])
                self._replicas.sent[replica].add(
                    least=size * (tf.reduce_sum(routed.counts) - mine)
                )
        return {
            i: self._exchanges[i].send_keys(
                replica, routed, longest[i], training
            )
            for i, routed in routes.items()
        }

    def send(
        self,
        replica: int,
        received: Mapping[int, Received],
        values: Mapping[int, tf.Tensor],
        kind: int,
    ) -> dict[int, tf.Tensor]:
        """Sends what belongs to keys, after these.

        Args:
            replica: the local replica that calls.
            received: what `send_keys` returned.
            values: by the kind of message.
            kind: `ROWS`: answers with the rows asked for, of the dtype that
                they are sent as, and returns the answers, [`num_rows`, dim]. A
                replica's own rows are rounded as those of the others are: one
                id has one row on all. `GRADIENTS`: sends the answers' gradients
                back, float32 or of the wire's dtype, rounded once in each
                stage, and returns those of the rows, float32. `COUNTS`: sends
                how often each unique key occurred, [u] int64, to its shard, and
                returns the counts of the rows asked for; padding is 0.
        """
        if kind == GRADIENTS:
            values = {i: self._wire.encode(v) for i, v in values.items()}
        found = {
            i: self._exchanges[i].send(replica, asked, values[i], kind)
            for i, asked in received.items()
        }
        if kind == GRADIENTS:
            found = {i: self._wire.decode(v) for i, v in found.items()}
        return found


class TwoStages(RowExchange):
    """Exchanges inside groups of neighbouring ranks, then between these.

    Key k is of the replica of rank k % world, which has place
    (k % world) % size in its group. In its own group, a replica asks the one of
    that place, which asks that of the same place in the key's group. Inside of
    a stage keys are sent as their quotients, so that those of the second stage
    follow from those of the first. This is the exchange of the first stage, and
    has that of the second.

    Args:
        replicas: all replicas.
        groups: those of tables; see `RowExchange`.
        size: the number of replicas in a group of the first stage.
        wire: what gradients are sent as.
    """

    def __init__(
        self,
        replicas: Replicas,
        groups: Sequence[tuple[int, Wire]],
        size: int,
        wire: Wire,
    ) -> None:
        inner = replicas.split(size, neighbours=True)
        outer = replicas.split(replicas.world // size, neighbours=False)
        super().__init__(inner, groups, wire)
        self._second = RowExchange(outer, groups, wire)
        self._all_replicas = replicas
        self._sizes_channel = replicas.allocate(1)

    def send_keys(
        self,
        replica: int,
        routes: Mapping[int, Route],
        longest: tf.Tensor,
        training: bool,
    ) -> dict[int, Received]:
        firsts = super().send_keys(replica, routes, longest, training)
        collected = {
            i: self._second.route(
                replica,
                tf.gather(first.rows, first.places),
                training,
                None
                if first.table_of is None
                else tf.gather(first.table_of, first.places),
                routes[i].counts.shape[1],
            )
            for i, first in firsts.items()
        }
        longest = self._all_replicas.max(
            replica,
            tf.stack(self._second.sizes(collected)),
            self._sizes_channel,
        )
        seconds = self._second.send_keys(replica, collected, longest, training)
        return {
            i: second._replace(
                position=first.position,
                num_rows=first.num_rows,
                collected=Collected(first, collected[i], second),
            )
            for (i, first), second in zip(
                firsts.items(), seconds.values(), strict=True
            )
        }

    def send(
        self,
        replica: int,
        received: Mapping[int, Received],
        values: Mapping[int, tf.Tensor],
        kind: int,
    ) -> dict[int, tf.Tensor]:
        firsts, routes, seconds = _stages(received)
        if kind == ROWS:
            found = self._second.send(replica, seconds, values, kind)
            answers = {}
            for i, first in firsts.items():
                # Where nothing was asked for, any row will do.
                place = tf.scatter_nd(
                    first.places[:, None],
                    tf.gather(seconds[i].position, routes[i].index),
                    [first.num_rows],
                )
                answers[i] = tf.gather(found[i], place)
            return super().send(replica, firsts, answers, kind)
        found = super().send(replica, firsts, values, kind)
        operations = backend.of(self._replicas.devices[replica], training=True)
        sums = {}
        for i, first in firsts.items():
            route, second = routes[i], seconds[i]
            if kind == COUNTS:
                sums[i] = tf.math.unsorted_segment_sum(
                    tf.gather(found[i], first.places),
                    route.index,
                    tf.size(route.row),
                )
                continue
            index = tf.gather(second.position, route.index)
            sums[i] = operations.sum_gradients_by_row(
                [found[i]],
                [BaggedIds.of_rows(index, first.places, first.num_rows)],
                index,
                second.num_rows,
                self._wire.dtype,
            )
        return self._second.send(replica, seconds, sums, kind)


def make(
    replicas: Replicas,
    groups: Sequence[tuple[int, Wire]],
    wire: Wire,
) -> RowExchange:
    """Makes the exchange of a strategy's replicas.

    All workers must, at the same time.

    Args:
        replicas: the replicas.
        groups: those of tables; see `RowExchange`.
        wire: what gradients are sent as.
    """
    size = GROUP_SIZE
    if size is None:
        size = first_stage(replicas.world, replicas.on_host)
    if size > 1:
        return TwoStages(replicas, groups, size, wire)
    return RowExchange(replicas, groups, wire)


def _stages(
    received: Mapping[int, Received],
) -> tuple[dict[int, Received], dict[int, Route], dict[int, Received]]:
    """The first stage, its keys made unique, and the second, by group."""
    stages: Any = {}, {}, {}
    for i, each in received.items():
        assert each.collected is not None, "the exchange has one stage"
        for stage, value in zip(stages, each.collected, strict=True):
            stage[i] = value
    return stages
