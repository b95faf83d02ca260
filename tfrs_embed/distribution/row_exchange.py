"""The exchange of keys, rows and gradients of all groups of tables.

In one stage, every replica has a message for every other. In two stages, the
replicas of a host collect what they want of other hosts, each for those of the
same place on all hosts: repeated keys of a host travel between hosts once, and
messages are fewer and longer.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.distribution import exchange
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


class RowExchange(abc.ABC):
    """Exchanges the keys, rows and gradients of several groups of tables.

    A group is named by its number. All replicas must call together.
    """

    @abc.abstractmethod
    def route(
        self, keys: tf.Tensor, device: str | None, training: bool
    ) -> Route:
        """Finds where keys are sent first, as `messages.route` does."""

    @abc.abstractmethod
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

    @abc.abstractmethod
    def _send_counts(
        self,
        replica: int,
        number: int,
        routed: Route,
        received: Received,
        counts: tf.Tensor,
    ) -> tf.Tensor:
        """Sends how often keys occurred; see `Exchange.send_counts`."""

    @abc.abstractmethod
    def _send_rows(
        self, replica: int, number: int, received: Received, rows: tf.Tensor
    ) -> tf.Tensor:
        """Answers with rows, and returns the answers.

        Args:
            replica: the local replica that calls.
            number: the group.
            received: what `send_keys` returned.
            rows: those asked for, as the wire has encoded them.

        Returns:
            [`num_rows`, dim] of the wire's dtype. A replica's own rows are
            rounded as those of the others are: one id has one row on all.
        """

    @abc.abstractmethod
    def _send_gradients(
        self,
        replica: int,
        number: int,
        received: Received,
        gradients: tf.Tensor,
        device: str | None,
    ) -> tf.Tensor:
        """Sends the answers' gradients back, rounded once in each stage.

        Args:
            replica: the local replica that calls.
            number: the group.
            received: what `send_keys` returned.
            gradients: [`num_rows`, dim] float32, or of the wire's dtype.
            device: where the shard is.

        Returns:
            Those of `rows`, float32.
        """

    @abc.abstractmethod
    def num_rows(self, received: Received) -> tf.Tensor:
        """The number of rows that come back, padding included."""

    @abc.abstractmethod
    def sent(self, received: Received) -> tuple[tf.Tensor, tf.Tensor]:
        """The messages of keys that a replica sends to others, and the keys."""

    @abc.abstractmethod
    def needed(
        self, replica: int, routed: Route, received: Received
    ) -> tf.Tensor:
        """How many keys a replica would send to others without padding."""

    def units(self, numbers: Sequence[int]) -> list[list[int]]:
        """Which of some groups travel together: their places among these."""
        return [[place] for place in range(len(numbers))]

    def sizes(
        self, numbers: Sequence[int], routes: Sequence[Route]
    ) -> list[tf.Tensor]:
        """The longest of a replica's messages, of which all need the largest.

        Args:
            numbers: the groups of a lookup.
            routes: the replica's keys of each.

        Returns:
            Scalars int64, as many for any groups.
        """
        sizes = [tf.constant(0, tf.int64)] * self.num_sizes
        for i, routed in zip(numbers, routes, strict=True):
            sizes[i] = tf.reduce_max(routed.counts)
        return sizes

    @property
    def num_sizes(self) -> int:
        """How many sizes there are."""
        return len(self._rows)

    def send_counts(
        self,
        replica: int,
        numbers: Sequence[int],
        routes: Sequence[Route],
        received: Sequence[Received],
        counts: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Sends how often keys of several groups occurred."""
        return [
            self._send_counts(replica, *each)
            for each in zip(numbers, routes, received, counts, strict=True)
        ]

    def send_rows(
        self,
        replica: int,
        numbers: Sequence[int],
        received: Sequence[Received],
        rows: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Answers with rows of several groups; see `_send_rows`."""
        return [
            self._send_rows(replica, *each)
            for each in zip(numbers, received, rows, strict=True)
        ]

    def send_gradients(
        self,
        replica: int,
        numbers: Sequence[int],
        received: Sequence[Received],
        gradients: Sequence[tf.Tensor],
        device: str | None,
    ) -> list[tf.Tensor]:
        """Sends gradients of several groups back; see `_send_gradients`."""
        return [
            self._send_gradients(replica, *each, device)
            for each in zip(numbers, received, gradients, strict=True)
        ]

    _rows: Sequence[Wire]

    #: The number of stages. Each is a collective for each group and kind of
    #: message, and one more on the messages' sizes.
    stages: int


class OneStage(RowExchange):
    """Sends everything to where it belongs.

    Args:
        replicas: the replicas.
        rows: for each group, what its rows are sent as.
        wire: what gradients are sent as.
    """

    stages = 1

    def __init__(
        self, replicas: Replicas, rows: Sequence[Wire], wire: Wire
    ) -> None:
        self._replicas = replicas
        self._rows = rows
        self._wire = wire
        self._exchanges = [
            Exchange(replicas, replicas.allocate(exchange.CHANNELS))
            for _ in rows
        ]

    def route(
        self, keys: tf.Tensor, device: str | None, training: bool
    ) -> Route:
        world = self._replicas.world
        return backend.of(device, training).route(keys, world)

    def send_keys(
        self,
        replica: int,
        numbers: Sequence[int],
        routes: Sequence[Route],
        longest: tf.Tensor,
        device: str | None,
        training: bool,
    ) -> list[Received]:
        return [
            self._exchanges[i].send_keys(
                replica, routed, longest[i], device, training
            )
            for i, routed in zip(numbers, routes, strict=True)
        ]

    def _send_counts(
        self,
        replica: int,
        number: int,
        routed: Route,
        received: Received,
        counts: tf.Tensor,
    ) -> tf.Tensor:
        return self._exchanges[number].send_counts(
            replica, routed, received, counts
        )

    def _send_rows(
        self, replica: int, number: int, received: Received, rows: tf.Tensor
    ) -> tf.Tensor:
        exchange = self._exchanges[number]
        return self._rows[number].read(
            exchange.send_rows(replica, received, rows)
        )

    def _send_gradients(
        self,
        replica: int,
        number: int,
        received: Received,
        gradients: tf.Tensor,
        device: str | None,
    ) -> tf.Tensor:
        return self._wire.decode(
            self._exchanges[number].send_gradients(
                replica, received, self._wire.encode(gradients)
            )
        )

    def num_rows(self, received: Received) -> tf.Tensor:
        return self._replicas.world * received.capacity

    def sent(self, received: Received) -> tuple[tf.Tensor, tf.Tensor]:
        return _sent(self._replicas.world, received)

    def needed(
        self, replica: int, routed: Route, received: Received
    ) -> tf.Tensor:
        return _others(routed, self._replicas.ranks[replica])


class Joined(OneStage):
    """Sends everything to where it belongs, groups of one width together.

    Args:
        replicas: the replicas; more than one.
        rows: for each group, what its rows are sent as.
        wire: what gradients are sent as.
        dims: the groups' widths.
    """

    def __init__(
        self,
        replicas: Replicas,
        rows: Sequence[Wire],
        wire: Wire,
        dims: Sequence[int],
    ) -> None:
        super().__init__(replicas, rows, wire)
        kinds = list(zip(dims, rows, strict=True))
        self._kinds = list(dict.fromkeys(kinds))
        self._kind_of = [self._kinds.index(kind) for kind in kinds]
        self._joined = [
            JoinedExchange(replicas, replicas.allocate(exchange.CHANNELS))
            for _ in self._kinds
        ]

    def units(self, numbers: Sequence[int]) -> list[list[int]]:
        by_kind: dict[int, list[int]] = {}
        for place, i in enumerate(numbers):
            by_kind.setdefault(self._kind_of[i], []).append(place)
        return list(by_kind.values())

    def _each(
        self, numbers: Sequence[int], function: Callable[..., Any], *values: Any
    ) -> list[Any]:
        """Maps an exchange and its groups' values to the groups' results."""
        found: list[Any] = [None] * len(numbers)
        for places in self.units(numbers):
            kind = self._kind_of[numbers[places[0]]]
            results = function(
                kind, *([each[place] for place in places] for each in values)
            )
            for place, result in zip(places, results, strict=True):
                found[place] = result
        return found

    def sizes(
        self, numbers: Sequence[int], routes: Sequence[Route]
    ) -> list[tf.Tensor]:
        sizes = [tf.constant(0, tf.int64)] * self.num_sizes
        for places in self.units(numbers):
            sizes[self._kind_of[numbers[places[0]]]] = JoinedExchange.longest(
                [routes[place] for place in places]
            )
        return sizes

    @property
    def num_sizes(self) -> int:
        return len(self._kinds)

    def send_keys(
        self,
        replica: int,
        numbers: Sequence[int],
        routes: Sequence[Route],
        longest: tf.Tensor,
        device: str | None,
        training: bool,
    ) -> list[Received]:
        return self._each(
            numbers,
            lambda kind, of_kind: self._joined[kind].send_keys(
                replica, of_kind, longest[kind]
            ),
            routes,
        )

    def send_counts(
        self,
        replica: int,
        numbers: Sequence[int],
        routes: Sequence[Route],
        received: Sequence[Received],
        counts: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        return self._each(
            numbers,
            lambda kind, *values: self._joined[kind].send_counts(
                replica, *values
            ),
            received,
            counts,
        )

    def send_rows(
        self,
        replica: int,
        numbers: Sequence[int],
        received: Sequence[Received],
        rows: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        return self._each(
            numbers,
            lambda kind, *values: [
                self._kinds[kind][1].read(each)
                for each in self._joined[kind].send_rows(replica, *values)
            ],
            received,
            rows,
        )

    def send_gradients(
        self,
        replica: int,
        numbers: Sequence[int],
        received: Sequence[Received],
        gradients: Sequence[tf.Tensor],
        device: str | None,
    ) -> list[tf.Tensor]:
        wire = self._wire
        return self._each(
            numbers,
            lambda kind, of_kind, values: [
                wire.decode(each)
                for each in self._joined[kind].send_gradients(
                    replica, of_kind, [wire.encode(each) for each in values]
                )
            ],
            received,
            gradients,
        )

    def num_rows(self, received: Received) -> tf.Tensor:
        return tf.size(received.position)

    def sent(self, received: Received) -> tuple[tf.Tensor, tf.Tensor]:
        # The numbers of keys are among these.
        others, keys = super().sent(received)
        return tf.zeros_like(others), keys


class TwoStages(RowExchange):
    """Exchanges inside groups of neighbouring ranks, then between these.

    Key k is of the replica of rank k % world, which has place
    (k % world) % size in its group. In its own group, a replica asks the one of
    that place, which asks that of the same place in the key's group. Inside of
    a stage keys are sent as their quotients, so that those of the second stage
    follow from those of the first.

    Args:
        replicas: the replicas.
        rows: for each group of tables, what its rows are sent as.
        size: the number of replicas in a group of the first stage.
        wire: what gradients are sent as.
    """

    stages = 2

    def __init__(
        self, replicas: Replicas, rows: Sequence[Wire], size: int, wire: Wire
    ) -> None:
        self._replicas = replicas
        self._rows = rows
        self._wire = wire
        self._inner = Subgroups(replicas, size, neighbours=True)
        self._outer = Subgroups(
            replicas, replicas.world // size, neighbours=False
        )
        self._sizes_channel = replicas.allocate(1)
        self._first, self._second = (
            [
                Exchange(peers, replicas.allocate(exchange.CHANNELS))
                for _ in rows
            ]
            for peers in (self._inner, self._outer)
        )

    def route(
        self, keys: tf.Tensor, device: str | None, training: bool
    ) -> Route:
        return backend.of(device, training).route(keys, self._inner.world)

    def send_keys(
        self,
        replica: int,
        numbers: Sequence[int],
        routes: Sequence[Route],
        longest: tf.Tensor,
        device: str | None,
        training: bool,
    ) -> list[Received]:
        firsts = [
            self._first[i].send_keys(
                replica, routed, longest[i], device, training
            )
            for i, routed in zip(numbers, routes, strict=True)
        ]
        collected = [
            backend.of(device, training).route(
                tf.gather(first.rows, first.places), self._outer.world
            )
            for first in firsts
        ]
        sizes = [tf.constant(0, tf.int64)] * len(self._rows)
        for i, routed in zip(numbers, collected, strict=True):
            sizes[i] = tf.reduce_max(routed.counts)
        longest = self._replicas.max(
            replica, tf.stack(sizes), self._sizes_channel
        )
        found = []
        for i, first, routed in zip(numbers, firsts, collected, strict=True):
            asked = self._second[i].send_keys(
                replica, routed, longest[i], device, training
            )
            found.append(
                asked._replace(
                    position=first.position,
                    collected=Collected(first, routed, asked.position),
                )
            )
        return found

    def _send_counts(
        self,
        replica: int,
        number: int,
        routed: Route,
        received: Received,
        counts: tf.Tensor,
    ) -> tf.Tensor:
        first, collected, position = _collected(received)
        counts = self._first[number].send_counts(replica, routed, first, counts)
        counts = tf.math.unsorted_segment_sum(
            tf.gather(counts, first.places),
            collected.index,
            tf.size(collected.row),
        )
        return self._second[number].send_counts(
            replica, collected, received._replace(position=position), counts
        )

    def _send_rows(
        self, replica: int, number: int, received: Received, rows: tf.Tensor
    ) -> tf.Tensor:
        first, collected, position = _collected(received)
        found = self._second[number].send_rows(replica, received, rows)
        # Where nothing was asked for, any row will do.
        place = tf.scatter_nd(
            first.places[:, None],
            tf.gather(position, collected.index),
            [self.num_rows(received)],
        )
        return self._rows[number].read(
            self._first[number].send_rows(
                replica, first, tf.gather(found, place)
            )
        )

    def _send_gradients(
        self,
        replica: int,
        number: int,
        received: Received,
        gradients: tf.Tensor,
        device: str | None,
    ) -> tf.Tensor:
        first, collected, position = _collected(received)
        wire = self._wire
        got = wire.decode(
            self._first[number].send_gradients(
                replica, first, wire.encode(gradients)
            )
        )
        index = tf.gather(position, collected.index)
        total = backend.of(device, training=True).sum_gradients_by_row(
            [got],
            [BaggedIds.of_rows(index, first.places, self.num_rows(received))],
            index,
            self._outer.world * received.capacity,
            wire.dtype,
        )
        return wire.decode(
            self._second[number].send_gradients(
                replica, received, wire.encode(total)
            )
        )

    def num_rows(self, received: Received) -> tf.Tensor:
        return self._inner.world * _collected(received).first.capacity

    def sent(self, received: Received) -> tuple[tf.Tensor, tf.Tensor]:
        first = _sent(self._inner.world, _collected(received).first)
        second = _sent(self._outer.world, received)
        return first[0] + second[0], first[1] + second[1]

    def needed(
        self, replica: int, routed: Route, received: Received
    ) -> tf.Tensor:
        collected = _collected(received).route
        return _others(routed, self._inner.ranks[replica]) + _others(
            collected, self._outer.ranks[replica]
        )


def make(
    replicas: Replicas,
    rows: Sequence[Wire],
    wire: Wire,
    joined: Sequence[int] | None = None,
) -> RowExchange:
    """Makes the exchange of a strategy's replicas.

    All workers must, at the same time.

    Args:
        replicas: the replicas.
        rows: for each group of tables, what its rows are sent as.
        wire: what gradients are sent as.
        joined: the groups' widths, if groups of one width are to travel
            together; in two stages none do.
    """
    size = GROUP_SIZE
    if size is None:
        size = first_stage(replicas.world, replicas.on_host)
    if size == 1 and joined and len(joined) > 1 and replicas.world > 1:
        return Joined(replicas, rows, wire, joined)
    if size == 1:
        return OneStage(replicas, rows, wire)
    return TwoStages(replicas, rows, size, wire)


def _collected(received: Received) -> Collected:
    assert received.collected is not None, "the exchange has one stage"
    return received.collected


def _sent(world: int, received: Received) -> tuple[tf.Tensor, tf.Tensor]:
    others = tf.constant(world - 1, tf.int64)
    return others, others * tf.cast(received.capacity, tf.int64)


def _others(routed: Route, place: int) -> tf.Tensor:
    return tf.reduce_sum(routed.counts) - routed.counts[place]
