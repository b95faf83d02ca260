"""The exchange of keys, rows and gradients of all groups of tables.

In one stage, every replica has a message for every other. In two stages, the
replicas of a host collect what they want of other hosts, each for those of the
same place on all hosts: repeated keys of a host travel between hosts once, and
messages are fewer and longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

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
from tfrs_embed.distribution.subgroups import Subgroups
from tfrs_embed.distribution.traffic import Sent
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
        stages: the number of stages. Each is a collective for each group and
            kind of message, and one more on the messages' sizes.
    """

    stages = 1

    def __init__(
        self,
        replicas: Replicas | Subgroups,
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
        return {
            i: self._exchanges[i].send_keys(
                replica, routed, longest[i], training
            )
            for i, routed in routes.items()
        }

    def _send(
        self,
        replica: int,
        received: Mapping[int, Received],
        values: Mapping[int, tf.Tensor],
        kind: int,
    ) -> dict[int, tf.Tensor]:
        """Sends messages of one kind; see `Exchange.send`."""
        return {
            i: self._exchanges[i].send(replica, asked, values[i], kind)
            for i, asked in received.items()
        }

    def send_counts(
        self,
        replica: int,
        received: Mapping[int, Received],
        counts: Mapping[int, tf.Tensor],
    ) -> dict[int, tf.Tensor]:
        """Sends how often keys occurred; see `Exchange.send`."""
        return self._send(replica, received, counts, COUNTS)

    def send_rows(
        self,
        replica: int,
        received: Mapping[int, Received],
        rows: Mapping[int, tf.Tensor],
    ) -> dict[int, tf.Tensor]:
        """Answers with rows, and returns the answers.

        Args:
            replica: the local replica that calls.
            received: what `send_keys` returned.
            rows: those asked for, of the dtype that they are sent as.

        Returns:
            [`num_rows`, dim] of that dtype. A replica's own rows are rounded as
            those of the others are: one id has one row on all.
        """
        return self._send(replica, received, rows, ROWS)

    def send_gradients(
        self,
        replica: int,
        received: Mapping[int, Received],
        gradients: Mapping[int, tf.Tensor],
    ) -> dict[int, tf.Tensor]:
        """Sends the answers' gradients back, rounded once in each stage.

        Args:
            replica: the local replica that calls.
            received: what `send_keys` returned.
            gradients: [`num_rows`, dim] float32, or of the wire's dtype.

        Returns:
            Those of `rows`, float32.
        """
        encoded = {i: self._wire.encode(each) for i, each in gradients.items()}
        sent = self._send(replica, received, encoded, GRADIENTS)
        return {i: self._wire.decode(each) for i, each in sent.items()}

    def sent_by_lookup(
        self, routes: Mapping[int, Route], received: Mapping[int, Received]
    ) -> Sent:
        """What `send_keys` and `send_rows` have sent."""
        if self._replicas.world == 1:
            return Sent()
        sent = Sent(
            2 * self.stages * len(routes) + (self.stages - 1 if routes else 0)
        )
        for i, routed in routes.items():
            dim, wire = self._groups[i]
            row, gradient = wire.size * dim, self._wire.size * dim
            of_group = received[i]
            sent = sent.plus(
                bytes=of_group.keys * (8 + row) + 8 * of_group.heads,
                least=of_group.needed * (8 + row + gradient),
                unique=tf.reduce_sum(routed.counts),
            )
        return sent

    def sent_by_counts(self, received: Mapping[int, Received]) -> Sent:
        """What `send_counts` has sent."""
        return self._sent_once(received, lambda dim: 8)

    def sent_by_update(self, received: Mapping[int, Received]) -> Sent:
        """What `send_gradients` has sent."""
        return self._sent_once(received, lambda dim: self._wire.size * dim)

    def _sent_once(
        self, received: Mapping[int, Received], size: Callable[[int], int]
    ) -> Sent:
        """What one message of each group has sent.

        Args:
            received: what `send_keys` returned.
            size: returns a key's bytes, given its table's width.
        """
        if self._replicas.world == 1:
            return Sent()
        sent = Sent(self.stages * len(received))
        for i, each in received.items():
            dim, _ = self._groups[i]
            sent = sent.plus(bytes=each.keys * size(dim))
        return sent


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

    stages = 2

    def __init__(
        self,
        replicas: Replicas,
        groups: Sequence[tuple[int, Wire]],
        size: int,
        wire: Wire,
    ) -> None:
        inner = Subgroups(replicas, size, neighbours=True)
        outer = Subgroups(replicas, replicas.world // size, neighbours=False)
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
                keys=first.keys + second.keys,
                needed=first.needed + second.needed,
                heads=first.heads + second.heads,
                collected=Collected(first, collected[i], second),
            )
            for (i, first), second in zip(
                firsts.items(), seconds.values(), strict=True
            )
        }

    def send_counts(
        self,
        replica: int,
        received: Mapping[int, Received],
        counts: Mapping[int, tf.Tensor],
    ) -> dict[int, tf.Tensor]:
        firsts, seconds = _stages(received)
        found = super().send_counts(replica, firsts, counts)
        sums = {}
        for i, each in received.items():
            first, routed, _ = _collected(each)
            sums[i] = tf.math.unsorted_segment_sum(
                tf.gather(found[i], first.places),
                routed.index,
                tf.size(routed.row),
            )
        return self._second.send_counts(replica, seconds, sums)

    def send_rows(
        self,
        replica: int,
        received: Mapping[int, Received],
        rows: Mapping[int, tf.Tensor],
    ) -> dict[int, tf.Tensor]:
        firsts, seconds = _stages(received)
        found = self._second.send_rows(replica, seconds, rows)
        answers = {}
        for i, each in received.items():
            first, routed, second = _collected(each)
            # Where nothing was asked for, any row will do.
            place = tf.scatter_nd(
                first.places[:, None],
                tf.gather(second.position, routed.index),
                [first.num_rows],
            )
            answers[i] = tf.gather(found[i], place)
        return super().send_rows(replica, firsts, answers)

    def send_gradients(
        self,
        replica: int,
        received: Mapping[int, Received],
        gradients: Mapping[int, tf.Tensor],
    ) -> dict[int, tf.Tensor]:
        firsts, seconds = _stages(received)
        found = super().send_gradients(replica, firsts, gradients)
        operations = backend.of(self._replicas.devices[replica], training=True)
        sums = {}
        for i, each in received.items():
            first, routed, second = _collected(each)
            index = tf.gather(second.position, routed.index)
            sums[i] = operations.sum_gradients_by_row(
                [found[i]],
                [BaggedIds.of_rows(index, first.places, first.num_rows)],
                index,
                second.num_rows,
                self._wire.dtype,
            )
        return self._second.send_gradients(replica, seconds, sums)


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


def _collected(received: Received) -> Collected:
    assert received.collected is not None, "the exchange has one stage"
    return received.collected


def _stages(
    received: Mapping[int, Received],
) -> tuple[dict[int, Received], dict[int, Received]]:
    """The first and the second stage of what was received."""
    collected = {i: _collected(each) for i, each in received.items()}
    return (
        {i: each.first for i, each in collected.items()},
        {i: each.second for i, each in collected.items()},
    )
