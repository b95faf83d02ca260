"""The exchange of keys, rows and gradients between replicas and shards.

Keys are made unique on the replica that looks them up, so that each row travels
once in each direction. All replicas send each other messages of one capacity,
a bucket above the longest that any of them has for another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.distribution.replicas import Replicas, bucket_of
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
        table_of: [world * capacity] int32, the table of each row, if tables
            have keys that only differ by it; that of padding is 0.
        keyed: of tables that give rows to keys, the rows that were found, or
            that a training step has reserved, for those asked for.
        collected: what a first stage of the exchange has collected, if there
            are two.
    """

    rows: tf.Tensor
    places: tf.Tensor
    position: tf.Tensor
    num_rows: tf.Tensor
    capacity: tf.Tensor
    bucket: tf.Tensor
    table_of: tf.Tensor | None = None
    keyed: Any = None
    collected: Collected | None = None


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

    Rows and gradients are of any dtype that a `Wire` has.

    Args:
        replicas: those that exchange: all, or the groups of some.
    """

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas
        self._channel = replicas.allocate(4)

    def longest(self, routed: Route) -> tf.Tensor:
        """The keys in the longest of a replica's messages: scalar int64."""
        counts = routed.counts
        if counts.shape[1] != 1:
            counts = tf.reduce_sum(counts, 1)
        return tf.reduce_max(counts)

    def send_keys(
        self,
        replica: int,
        routed: Route,
        longest: tf.Tensor,
        training: bool,
    ) -> Received:
        """Sends keys to their shards.

        Args:
            replica: the local replica that calls.
            routed: its keys.
            longest: scalar int64, the largest of the replicas' `longest`.
            training: whether this is part of a training step.

        Returns:
            What the others asked of this one.
        """
        world, tables = routed.counts.shape
        if world == 1:
            size = tf.size(routed.row)
            place, zero = tf.range(size), tf.constant(0)
            table_of = None
            if tables > 1:
                ends = tf.cumsum(tf.cast(routed.counts[0], tf.int32))
                table_of = bag_of_id(tf.concat([[0], ends], 0))
            return Received(
                routed.row, place, place, size, size, zero, table_of
            )
        capacity, bucket = bucket_of(longest)
        operations = backend.of(self._replicas.devices[replica], training)
        message, position = operations.write_keys(routed, capacity)
        message = self._replicas.all_to_all(
            replica, message, self._channel + KEYS, bucket
        )
        rows, table_of, places = operations.read_keys(message, capacity, tables)
        return Received(
            rows,
            places,
            position,
            world * capacity,
            capacity,
            bucket,
            table_of if tables > 1 else None,
        )

    def send(
        self,
        replica: int,
        asked: Received,
        values: tf.Tensor,
        kind: int,
    ) -> tf.Tensor:
        """Sends what belongs to keys, as it is; see `RowExchange.send`."""
        if self._replicas.world == 1:
            return values
        if kind == COUNTS:
            place = asked.position[:, None]
            values = tf.scatter_nd(place, values, [asked.num_rows])
        width = values.shape[1:].as_list()
        shape = [self._replicas.world, asked.capacity, *width]
        sent = self._replicas.all_to_all(
            replica,
            tf.reshape(values, shape),
            self._channel + kind,
            asked.bucket,
        )
        return tf.reshape(sent, [-1, *width])
