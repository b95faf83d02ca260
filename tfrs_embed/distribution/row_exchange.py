"""The exchange of keys, rows and gradients of all groups of tables.

In one stage, every replica has a message for every other. In two stages, the
replicas of a host collect what they want of other hosts, each for those of the
same place on all hosts: repeated keys of a host travel between hosts once, and
messages are fewer and longer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.distribution.exchange import (
    Collected,
    Exchange,
    JoinedExchange,
    Received,
)
from tfrs_embed.distribution.exchange_kind import first_stage
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.distribution.subgroups import Subgroups
from tfrs_embed.distribution.wire import Wire
from tfrs_embed.ops import backend
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.messages import Route

#: The size of the groups of the first stage; None: `first_stage` says it.
GROUP_SIZE: int | None = None


class RowExchange:
    """Exchanges keys, rows and gradients of groups of tables, in one stage.

    A group is named by its number. All replicas must call together.

    Args:
        replicas: those that exchange: all, or the groups of some.
        num_groups: the number of groups of tables.
        wire: what gradients are sent as.
        kinds: the kinds of the groups, if groups of one kind are to travel
            together; there must be several replicas then.

    Attributes:
        num_sizes: how many sizes a replica has.
        stages: the number of stages. Each is a collective for each unit and
            kind of message, and one more on the messages' sizes.
    """

    stages = 1

    def __init__(
        self,
        replicas: Replicas | Subgroups,
        num_groups: int,
        wire: Wire,
        kinds: Sequence[Any] | None = None,
    ) -> None:
        self._replicas = replicas
        self._wire = wire
        make: type[Exchange] = Exchange if kinds is None else JoinedExchange
        kinds = range(num_groups) if kinds is None else kinds
        distinct = list(dict.fromkeys(kinds))
        # The exchange of each group, by its place.
        self._unit_of = [distinct.index(kind) for kind in kinds]
        self._exchanges = [make(replicas) for _ in distinct]
        self.num_sizes = len(distinct)

    def units(self, numbers: Sequence[int]) -> list[list[int]]:
        """Which of some groups travel together: their places among these."""
        by_unit: dict[int, list[int]] = {}
        for place, i in enumerate(numbers):
            by_unit.setdefault(self._unit_of[i], []).append(place)
        return list(by_unit.values())

    def _each(
        self, numbers: Sequence[int], function: Callable[..., Any], *values: Any
    ) -> list[Any]:
        """Calls a function for each unit.

        Args:
            numbers: the groups.
            function: takes a unit's number, and the values of its groups.
            *values: of each group.

        Returns:
            The result for each group.
        """
        found: list[Any] = [None] * len(numbers)
        for places in self.units(numbers):
            results = function(
                self._unit_of[numbers[places[0]]],
                *([each[place] for place in places] for each in values),
            )
            for place, result in zip(places, results, strict=True):
                found[place] = result
        return found

    def route(
        self, keys: tf.Tensor, device: str | None, training: bool
    ) -> Route:
        """Finds where keys are sent first, as `messages.route` does."""
        return backend.of(device, training).route(keys, self._replicas.world)

    def sizes(
        self, numbers: Sequence[int], routes: Sequence[Route]
    ) -> list[tf.Tensor]:
        """The longest of a replica's messages, of which all need the largest.

        Args:
            numbers: the groups of a lookup.
            routes: the replica's keys of each.

        Returns:
            `num_sizes` scalars int64, whatever the groups.
        """
        sizes = [tf.constant(0, tf.int64)] * self.num_sizes
        for places in self.units(numbers):
            unit = self._unit_of[numbers[places[0]]]
            of_unit = [routes[place] for place in places]
            sizes[unit] = self._exchanges[unit].longest(of_unit)
        return sizes

    def send_keys(
        self,
        replica: int,
        numbers: Sequence[int],
        routes: Sequence[Route],
        longest: tf.Tensor,
        device: str | None,
        training: bool,
    ) -> list[Received]:
        """Sends keys to their shards.

        Args:
            replica: the local replica that calls.
            numbers: the groups.
            routes: of each of these, the replica's keys.
            longest: int64, the largest of all replicas' `sizes`; there may be
                more behind them.
            device: where the keys are.
            training: whether this is part of a training step.

        Returns:
            For each of these groups, what the others asked of this replica.
        """
        found = self._each(
            numbers,
            lambda unit, of_unit: self._exchanges[unit].send_keys(
                replica, of_unit, longest[unit], device, training
            ),
            routes,
        )
        return [
            received._replace(number=i)
            for i, received in zip(numbers, found, strict=True)
        ]

    def send_counts(
        self,
        replica: int,
        received: Sequence[Received],
        counts: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Sends how often keys occurred; see `Exchange.send_counts`."""
        return self._each(
            [each.number for each in received],
            lambda unit, *values: self._exchanges[unit].send_counts(
                replica, *values
            ),
            received,
            counts,
        )

    def send_rows(
        self,
        replica: int,
        received: Sequence[Received],
        rows: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Answers with rows, and returns the answers.

        Args:
            replica: the local replica that calls.
            received: what `send_keys` returned.
            rows: those asked for, of the dtype that they are sent as.

        Returns:
            [`num_rows`, dim] of that dtype. A replica's own rows are rounded as
            those of the others are: one id has one row on all.
        """
        return self._each(
            [each.number for each in received],
            lambda unit, *values: self._exchanges[unit].send_rows(
                replica, *values
            ),
            received,
            rows,
        )

    def send_gradients(
        self,
        replica: int,
        received: Sequence[Received],
        gradients: Sequence[tf.Tensor],
        device: str | None,
    ) -> list[tf.Tensor]:
        """Sends the answers' gradients back, rounded once in each stage.

        Args:
            replica: the local replica that calls.
            received: what `send_keys` returned.
            gradients: [`num_rows`, dim] float32, or of the wire's dtype.
            device: where the shard is.

        Returns:
            Those of `rows`, float32.
        """
        sent = self._each(
            [each.number for each in received],
            lambda unit, *values: self._exchanges[unit].send_gradients(
                replica, *values
            ),
            received,
            [self._wire.encode(each) for each in gradients],
        )
        return [self._wire.decode(each) for each in sent]

    def num_rows(self, received: Received) -> tf.Tensor:
        """The number of rows that come back, padding included."""
        return self._exchange_of(received).num_rows(received)

    def sent(self, received: Received) -> tuple[tf.Tensor, tf.Tensor]:
        """The messages of keys that a replica sends to others, and the keys."""
        return self._exchange_of(received).sent(received)

    def needed(
        self, replica: int, routed: Route, received: Received
    ) -> tf.Tensor:
        """How many keys a replica would send to others without padding."""
        return self._exchange_of(received).needed(replica, routed)

    def _exchange_of(self, received: Received) -> Exchange:
        return self._exchanges[self._unit_of[received.number]]


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
        num_groups: the number of groups of tables.
        size: the number of replicas in a group of the first stage.
        wire: what gradients are sent as.
    """

    stages = 2

    def __init__(
        self, replicas: Replicas, num_groups: int, size: int, wire: Wire
    ) -> None:
        inner = Subgroups(replicas, size, neighbours=True)
        outer = Subgroups(replicas, replicas.world // size, neighbours=False)
        super().__init__(inner, num_groups, wire)
        self._second = RowExchange(outer, num_groups, wire)
        self._all_replicas = replicas
        self._sizes_channel = replicas.allocate(1)

    def send_keys(
        self,
        replica: int,
        numbers: Sequence[int],
        routes: Sequence[Route],
        longest: tf.Tensor,
        device: str | None,
        training: bool,
    ) -> list[Received]:
        firsts = super().send_keys(
            replica, numbers, routes, longest, device, training
        )
        collected = [
            self._second.route(
                tf.gather(first.rows, first.places), device, training
            )
            for first in firsts
        ]
        longest = self._all_replicas.max(
            replica,
            tf.stack(self._second.sizes(numbers, collected)),
            self._sizes_channel,
        )
        seconds = self._second.send_keys(
            replica, numbers, collected, longest, device, training
        )
        return [
            second._replace(
                position=first.position,
                collected=Collected(first, routed, second.position),
            )
            for first, routed, second in zip(
                firsts, collected, seconds, strict=True
            )
        ]

    def send_counts(
        self,
        replica: int,
        received: Sequence[Received],
        counts: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        collected = [_collected(each) for each in received]
        found = super().send_counts(
            replica, [each.first for each in collected], counts
        )
        sums = [
            tf.math.unsorted_segment_sum(
                tf.gather(each, first.places),
                routed.index,
                tf.size(routed.row),
            )
            for each, (first, routed, _) in zip(found, collected, strict=True)
        ]
        seconds = [
            each._replace(position=position)
            for each, (_, _, position) in zip(received, collected, strict=True)
        ]
        return self._second.send_counts(replica, seconds, sums)

    def send_rows(
        self,
        replica: int,
        received: Sequence[Received],
        rows: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        collected = [_collected(each) for each in received]
        answers = []
        for each, (first, routed, position) in zip(
            self._second.send_rows(replica, received, rows),
            collected,
            strict=True,
        ):
            # Where nothing was asked for, any row will do.
            place = tf.scatter_nd(
                first.places[:, None],
                tf.gather(position, routed.index),
                [super().num_rows(first)],
            )
            answers.append(tf.gather(each, place))
        return super().send_rows(
            replica, [each.first for each in collected], answers
        )

    def send_gradients(
        self,
        replica: int,
        received: Sequence[Received],
        gradients: Sequence[tf.Tensor],
        device: str | None,
    ) -> list[tf.Tensor]:
        collected = [_collected(each) for each in received]
        found = super().send_gradients(
            replica, [each.first for each in collected], gradients, device
        )
        operations = backend.of(device, training=True)
        sums = []
        for each, got, (first, routed, position) in zip(
            received, found, collected, strict=True
        ):
            index = tf.gather(position, routed.index)
            number = super().num_rows(first)
            sums.append(
                operations.sum_gradients_by_row(
                    [got],
                    [BaggedIds.of_rows(index, first.places, number)],
                    index,
                    self._second.num_rows(each),
                    self._wire.dtype,
                )
            )
        return self._second.send_gradients(replica, received, sums, device)

    def num_rows(self, received: Received) -> tf.Tensor:
        return super().num_rows(_collected(received).first)

    def sent(self, received: Received) -> tuple[tf.Tensor, tf.Tensor]:
        first = super().sent(_collected(received).first)
        second = self._second.sent(received)
        return first[0] + second[0], first[1] + second[1]

    def needed(
        self, replica: int, routed: Route, received: Received
    ) -> tf.Tensor:
        collected = _collected(received)
        first = super().needed(replica, routed, collected.first)
        return first + self._second.needed(replica, collected.route, received)


def make(
    replicas: Replicas,
    num_groups: int,
    wire: Wire,
    kinds: Sequence[Any] | None = None,
) -> RowExchange:
    """Makes the exchange of a strategy's replicas.

    All workers must, at the same time.

    Args:
        replicas: the replicas.
        num_groups: the number of groups of tables.
        wire: what gradients are sent as.
        kinds: the kinds of the groups, if groups of one kind are to travel
            together; in two stages none do.
    """
    size = GROUP_SIZE
    if size is None:
        size = first_stage(replicas.world, replicas.on_host)
    if size > 1:
        return TwoStages(replicas, num_groups, size, wire)
    joins = kinds is not None and num_groups > 1 and replicas.world > 1
    return RowExchange(replicas, num_groups, wire, kinds if joins else None)


def _collected(received: Received) -> Collected:
    assert received.collected is not None, "the exchange has one stage"
    return received.collected
