"""The exchange of keys, rows and gradients between replicas and shards.

Keys are made unique on the replica that looks them up, so that each row travels
once in each direction. All replicas send each other messages of one capacity,
a bucket above the longest that any of them has for another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.distribution.replicas import Replicas, bucket_of
from tfrs_embed.distribution.subgroups import Subgroups
from tfrs_embed.ops import backend
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
