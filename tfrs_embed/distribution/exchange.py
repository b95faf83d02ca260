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

#: The kinds of messages of an exchange, each of which has a channel.
KEYS, ROWS, GRADIENTS, COUNTS = range(4)


class Received(NamedTuple):
    """One replica's messages from the others, and the layout of its own.

    Attributes:
        rows: [world * capacity] int64, the rows asked for; padding is 0.
        places: [m] int32, the places of those that are no padding.
        position: [u] int32, the place of each unique key's row among those that
            come back.
        num_rows: scalar int32, how many come back, padding included.
        capacity: scalar int32.
        bucket: scalar int32, the capacity's number.
        keys: scalar int64, the keys that this replica sends to others, padding
            included.
        needed: scalar int64, the same of this group alone, without padding.
        heads: how many numbers of keys it sends beside `keys`.
        reservation: the rows that a training step of a table that gives rows to
            keys has reserved for those asked for.
        version: scalar int64, when keys were found to have these rows.
        collected: what a first stage of the exchange has collected, if there
            are two.
        together: the messages that have the keys of several tables, if these
            are of such; rows and places are without padding then.
    """

    rows: tf.Tensor
    places: tf.Tensor
    position: tf.Tensor
    num_rows: tf.Tensor
    capacity: tf.Tensor
    bucket: tf.Tensor
    keys: tf.Tensor
    needed: tf.Tensor
    heads: int
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
        first: the first stage: the keys that the replicas of its group asked it
            for.
        route: these, made unique.
        second: the second stage, of these unique keys.
    """

    first: Received
    route: Route
    second: Received


class Exchange:
    """Exchanges the keys, rows and gradients of one group of tables.

    Rows and gradients are of any dtype that a `Wire` has. Methods take and
    return lists of one, as `JoinedExchange` does of several.

    Args:
        replicas: those that exchange: all, or the groups of some.
    """

    def __init__(self, replicas: Replicas | Subgroups) -> None:
        self._replicas = replicas
        self._channel = replicas.allocate(4)

    def longest(self, routes: Sequence[Route]) -> tf.Tensor:
        """The numbers in the longest of a replica's messages: scalar int64."""
        [routed] = routes
        return tf.reduce_max(routed.counts)

    def send_keys(
        self,
        replica: int,
        routes: Sequence[Route],
        longest: tf.Tensor,
        training: bool,
    ) -> list[Received]:
        """Sends keys to their shards.

        Args:
            replica: the local replica that calls.
            routes: its keys.
            longest: scalar int64, the largest of the replicas' `longest`.
            training: whether this is part of a training step.

        Returns:
            What the others asked of this one.
        """
        [routed] = routes
        if self._replicas.world == 1:
            size = tf.size(routed.row)
            place, zero = tf.range(size), tf.constant(0)
            return [
                Received(
                    routed.row, place, place, size, size, zero, zero, zero, 0
                )
            ]
        capacity, bucket = bucket_of(longest)
        operations = backend.of(self._replicas.devices[replica], training)
        message, position = operations.write_keys(routed, capacity)
        message = self._replicas.all_to_all(
            replica, message, self._channel + KEYS, bucket
        )
        rows, _, places = operations.read_keys(message, capacity)
        world = self._replicas.world
        return [
            Received(
                rows,
                places,
                position,
                world * capacity,
                capacity,
                bucket,
                (world - 1) * tf.cast(capacity, tf.int64),
                self._needed(replica, routed),
                world - 1,
            )
        ]

    def _needed(self, replica: int, routed: Route) -> tf.Tensor:
        """How many keys a replica would send to others without padding."""
        rank = self._replicas.ranks[replica]
        return tf.reduce_sum(routed.counts) - routed.counts[rank]

    def send(
        self,
        replica: int,
        received: Sequence[Received],
        values: Sequence[tf.Tensor],
        kind: int,
    ) -> list[tf.Tensor]:
        """Sends what belongs to keys, after these.

        Args:
            replica: the local replica that calls.
            received: what `send_keys` returned.
            values: by the kind of message.
            kind: `ROWS`: answers with the rows asked for, [..., dim], and
                returns the answers. `GRADIENTS`: sends the answers' gradients
                back, and returns those of the rows. `COUNTS`: sends how often
                each unique key occurred, [u] int64, to its shard, and returns
                the counts of the rows asked for; padding is 0.
        """
        if self._replicas.world == 1:
            return [*values]
        [asked], [each] = received, values
        if kind == COUNTS:
            place = asked.position[:, None]
            each = tf.scatter_nd(place, each, [asked.num_rows])
        return [self._send_messages(replica, asked, each, kind)]

    def _send_messages(
        self, replica: int, asked: Received, values: tf.Tensor, kind: int
    ) -> tf.Tensor:
        """Sends messages, [world * capacity, ...]; returns the others'."""
        width = values.shape[1:].as_list()
        shape = [self._replicas.world, asked.capacity, *width]
        sent = self._replicas.all_to_all(
            replica,
            tf.reshape(values, shape),
            self._channel + kind,
            asked.bucket,
        )
        return tf.reshape(sent, [-1, *width])


class JoinedExchange(Exchange):
    """Exchanges the keys, rows and gradients of several groups together.

    Their keys can't be told apart by their numbers: a message begins with the
    number of each group's keys, and has these one group after the other.

    Args:
        replicas: those that exchange; more than one.
    """

    def longest(self, routes: Sequence[Route]) -> tf.Tensor:
        keys = tf.add_n([routed.counts for routed in routes])
        return tf.reduce_max(keys) + len(routes)

    def send_keys(
        self,
        replica: int,
        routes: Sequence[Route],
        longest: tf.Tensor,
        training: bool,
    ) -> list[Received]:
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
            self._channel + KEYS,
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
        # The numbers of keys are among these.
        keys = (world - 1) * tf.cast(capacity, tf.int64)
        return [
            Received(
                each,
                tf.range(tf.size(each)),
                tf.range(tf.size(routed.row)),
                tf.size(routed.row),
                capacity,
                bucket,
                keys,
                self._needed(replica, routed),
                0,
                together=together,
            )
            for each, routed in zip(rows, routes, strict=True)
        ]

    def send(
        self,
        replica: int,
        received: Sequence[Received],
        values: Sequence[tf.Tensor],
        kind: int,
    ) -> list[tf.Tensor]:
        together = received[0].together
        assert together is not None
        here, there, sizes = together.sent, together.asked, together.asked_sizes
        if kind == ROWS:
            here, there, sizes = there, here, together.sizes
        joined = tf.concat(values, 0)
        size = self._replicas.world * received[0].capacity
        message = tf.scatter_nd(
            here[:, None], joined, [size, *joined.shape[1:].as_list()]
        )
        message = self._send_messages(replica, received[0], message, kind)
        return tf.split(tf.gather(message, there), sizes, num=len(values))


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
