"""The exchange of keys, rows and gradients between replicas and shards.

Keys are made unique on the replica that looks them up, so that each row travels
once in each direction. All replicas send each other messages of one capacity,
a bucket above the longest that any of them has for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.distribution.replicas import Replicas, bucket_of
from tfrs_embed.distribution.subgroups import Subgroups
from tfrs_embed.ops import backend
from tfrs_embed.ops.bags import bag_of_id
from tfrs_embed.ops.messages import Route

#: Collective channels that an exchange of one kind of rows uses.
CHANNELS = 4


class Received(NamedTuple):
    """One replica's messages from the others, and the layout of its own.

    Attributes:
        rows: [world * capacity] int64, the rows asked for; padding is 0.
        mask: [world * capacity] bool, which of them are no padding.
        places: [m] int32, the places of those.
        position: [u] int32, the place of each unique key's row among the
            [world * capacity] rows that come back.
        capacity: scalar int32.
        bucket: scalar int32, the capacity's number.
        reservation: the rows that a training step of a table that gives rows to
            keys has reserved for those asked for.
        version: scalar int64, when keys were found to have these rows.
        collected: what a first stage of the exchange has collected, if there
            are two.
        together: the messages that have the keys of several tables, if these
            are of such; rows, mask and places are without padding then.
    """

    rows: tf.Tensor
    mask: tf.Tensor
    places: tf.Tensor
    position: tf.Tensor
    capacity: tf.Tensor
    bucket: tf.Tensor
    reservation: Any = None
    version: tf.Tensor | None = None
    collected: Collected | None = None
    together: Together | None = None


class Together(NamedTuple):
    """The layout of messages that have the keys of several tables.

    Attributes:
        sent: [u] int32, the places of this replica's keys among the
            [world * capacity] of its messages, table after table.
        asked: [m] int32, the same of the keys that it was asked for.
        sizes: [tables] int64, how many keys each table has in `sent`.
        asked_sizes: [tables] int64, the same in `asked`.
    """

    sent: tf.Tensor
    asked: tf.Tensor
    sizes: tf.Tensor
    asked_sizes: tf.Tensor


class Collected(NamedTuple):
    """One replica's keys for its group, of an exchange in two stages.

    Attributes:
        first: the keys that the replicas of its group asked it for.
        route: these, made unique.
        position: [u] int32, the place of each unique key's row among the rows
            that come back in the second stage.
    """

    first: Received
    route: Route
    position: tf.Tensor


class Exchange:
    """Exchanges the keys, rows and gradients of one width.

    Rows and gradients are those of a `Wire`, of any dtype.

    Args:
        replicas: those that exchange: all, or the groups of some.
        channel: the first of `CHANNELS` collective channels.
    """

    def __init__(self, replicas: Replicas | Subgroups, channel: int) -> None:
        self._replicas = replicas
        self._channel = channel

    def send_keys(
        self,
        replica: int,
        routed: Route,
        longest: tf.Tensor,
        device: str | None,
        training: bool,
    ) -> Received:
        """Sends keys to their shards.

        Args:
            replica: the local replica that calls.
            routed: its keys.
            longest: scalar int64, the number of keys in the longest message
                between any two replicas.
            device: where the keys are.
            training: whether this is part of a training step.

        Returns:
            What the others asked of this one.
        """
        world = self._replicas.world
        if world == 1:
            size = tf.size(routed.row)
            place = tf.range(size)
            return Received(
                routed.row,
                tf.ones([size], tf.bool),
                place,
                place,
                size,
                tf.constant(0),
            )
        capacity, bucket = bucket_of(longest)
        operations = backend.of(device, training)
        message, position = operations.write_keys(routed, capacity)
        message = self._replicas.all_to_all(
            replica, message, self._channel, bucket
        )
        rows, mask, places = operations.read_keys(message, capacity)
        return Received(rows, mask, places, position, capacity, bucket)

    def send_counts(
        self,
        replica: int,
        routed: Route,
        received: Received,
        counts: tf.Tensor,
    ) -> tf.Tensor:
        """Sends how often each key occurred to its shard.

        Args:
            replica: the local replica that calls.
            routed: its keys.
            received: what `send_keys` returned.
            counts: [u] int64, of the unique keys.

        Returns:
            [world * capacity] int64, those of the keys that the others asked
            for; padding is 0.
        """
        world = self._replicas.world
        if world == 1:
            return counts
        message = tf.scatter_nd(
            received.position[:, None],
            counts,
            [world * received.capacity],
        )
        message = self._replicas.all_to_all(
            replica,
            tf.reshape(message, [world, received.capacity]),
            self._channel + 3,
            received.bucket,
        )
        return tf.reshape(message, [-1])

    def send_rows(
        self, replica: int, received: Received, rows: tf.Tensor
    ) -> tf.Tensor:
        """Answers with rows, [world * capacity, dim]; returns the answers."""
        return self._send(replica, received, rows, self._channel + 1)

    def send_gradients(
        self, replica: int, received: Received, gradients: tf.Tensor
    ) -> tf.Tensor:
        """Sends the answers' gradients back; returns those of `rows`."""
        return self._send(replica, received, gradients, self._channel + 2)

    def _send(
        self, replica: int, received: Received, values: tf.Tensor, channel: int
    ) -> tf.Tensor:
        if self._replicas.world == 1:
            return values
        dim = values.shape[1]
        shape = [self._replicas.world, received.capacity, dim]
        sent = self._replicas.all_to_all(
            replica, tf.reshape(values, shape), channel, received.bucket
        )
        return tf.reshape(sent, [-1, dim])


class JoinedExchange:
    """Exchanges the keys, rows and gradients of several tables together.

    Their keys can't be told apart by their numbers: a message begins with the
    number of each table's keys, and has these one table after the other.

    Args:
        replicas: all replicas; more than one.
        channel: the first of `CHANNELS` collective channels.
    """

    def __init__(self, replicas: Replicas, channel: int) -> None:
        self._replicas = replicas
        self._channel = channel

    @staticmethod
    def longest(routes: Sequence[Route]) -> tf.Tensor:
        """The numbers in the longest of a replica's messages: scalar int64."""
        keys = tf.add_n([routed.counts for routed in routes])
        return tf.reduce_max(keys) + len(routes)

    def send_keys(
        self, replica: int, routes: Sequence[Route], longest: tf.Tensor
    ) -> list[Received]:
        """Sends keys to their shards.

        Args:
            replica: the local replica that calls.
            routes: its keys of each table.
            longest: scalar int64, the largest of the replicas' `longest`.

        Returns:
            For each table, what the others asked of this one.
        """
        world, tables = self._replicas.world, len(routes)
        capacity, bucket = bucket_of(longest)
        counts = tf.stack([routed.counts for routed in routes])
        sent = _places_of_tables(counts, capacity)
        heads = tf.range(world)[:, None] * capacity + tf.range(tables)
        message = tf.scatter_nd(
            tf.concat([tf.reshape(heads, [-1]), sent], 0)[:, None],
            tf.concat(
                [
                    tf.reshape(tf.transpose(counts), [-1]),
                    *(routed.row for routed in routes),
                ],
                0,
            ),
            [world * capacity],
        )
        message = self._replicas.all_to_all(
            replica,
            tf.reshape(message, [world, capacity]),
            self._channel,
            bucket,
        )
        asked_counts = tf.transpose(message[:, :tables])
        asked_counts = tf.ensure_shape(asked_counts, [tables, world])
        asked = _places_of_tables(asked_counts, capacity)
        together = Together(
            sent,
            asked,
            tf.reduce_sum(counts, 1),
            tf.reduce_sum(asked_counts, 1),
        )
        rows = tf.split(
            tf.gather(tf.reshape(message, [-1]), asked),
            together.asked_sizes,
            num=tables,
        )
        return [
            Received(
                each,
                tf.ones_like(each, tf.bool),
                tf.range(tf.size(each)),
                tf.range(tf.size(routed.row)),
                capacity,
                bucket,
                together=together,
            )
            for each, routed in zip(rows, routes, strict=True)
        ]

    def send_counts(
        self,
        replica: int,
        received: Sequence[Received],
        counts: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Sends how often each key occurred to its shard, table by table."""
        return self._send(replica, received, counts, self._channel + 3)

    def send_rows(
        self,
        replica: int,
        received: Sequence[Received],
        rows: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Answers with rows, table by table; returns the answers."""
        return self._send(replica, received, rows, self._channel + 1, True)

    def send_gradients(
        self,
        replica: int,
        received: Sequence[Received],
        gradients: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Sends the answers' gradients back; returns those of the rows."""
        return self._send(replica, received, gradients, self._channel + 2)

    def _send(
        self,
        replica: int,
        received: Sequence[Received],
        values: Sequence[tf.Tensor],
        channel: int,
        answers: bool = False,
    ) -> list[tf.Tensor]:
        """Sends values of each table's keys, or those that answer them."""
        capacity, bucket = received[0].capacity, received[0].bucket
        together = received[0].together
        assert together is not None
        here, there, sizes = together.sent, together.asked, together.asked_sizes
        if answers:
            here, there, sizes = there, here, together.sizes
        world, joined = self._replicas.world, tf.concat(values, 0)
        width = joined.shape[1:].as_list()
        message = tf.scatter_nd(
            here[:, None], joined, [world * capacity, *width]
        )
        message = self._replicas.all_to_all(
            replica,
            tf.reshape(message, [world, capacity, *width]),
            channel,
            bucket,
        )
        found = tf.gather(tf.reshape(message, [-1, *width]), there)
        return tf.split(found, sizes, num=len(values))


def _places_of_tables(counts: tf.Tensor, capacity: tf.Tensor) -> tf.Tensor:
    """The places of tables' keys in messages, table after table.

    Args:
        counts: [tables, world] int64, the keys of each in each message.
        capacity: scalar int32, the length of a message, which begins with the
            number of each table's keys.

    Returns:
        [n] int32.
    """
    tables, world = counts.shape
    counts = tf.cast(counts, tf.int32)
    starts = tf.range(world) * capacity + tables
    starts += tf.cumsum(counts, exclusive=True)
    ends = tf.concat([[0], tf.cumsum(tf.reshape(counts, [-1]))], 0)
    run = bag_of_id(ends)
    shift = tf.reshape(starts, [-1]) - ends[:-1]
    return tf.gather(shift, run) + tf.range(tf.size(run))
