"""The exchange of keys, rows and gradients between replicas and shards.

Keys are unique on the replica that looks them up, so that each row is sent once
in each direction. All replicas' messages have one capacity: the next bucket
above the longest message.

In one stage, every replica has a message for every other. In two stages, the
replicas of a host first collect the keys for other hosts, each for the replicas
of its own place on all hosts. So a key that repeats on a host is sent to
another host once, and messages are fewer and longer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.distribution.exchange_kind import first_stage
from tfrs_embed.distribution.replicas import Replicas, bucket_of
from tfrs_embed.distribution.traffic import KEY, Collective, capacity_of
from tfrs_embed.distribution.wire import Wire
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.messages import Route

#: The kinds of messages; each has a channel.
KEYS, ROWS, GRADIENTS, COUNTS = range(4)


def collectives(
    keys: float, dim: int, row: int, gradient: int
) -> list[Collective]:
    """Returns a step's collectives for a group of tables, in one stage.

    Args:
        keys: the most keys that a replica has for another.
        dim: the group's width.
        row: the bytes of a sent number of a row.
        gradient: the bytes of a sent number of a gradient.
    """
    capacity = capacity_of(keys)
    numbers = dim * capacity
    sizes = KEY * (1 + capacity), row * numbers, gradient * numbers
    return [Collective("all_to_all", size) for size in sizes]


class ReceivedKeys(NamedTuple):
    """Requests to a replica, and the layout of its own request.

    Attributes:
        rows: [world * capacity] int64, the rows asked for; padding is 0.
        places: [m] int32, the indices of those that are no padding.
        position: [u] int32, the index of each unique key's row among the
            answers.
        num_rows: scalar int32, the number of answers, padding included.
        capacity: scalar int32.
        bucket: scalar int32, the capacity's number.
        table_of: [world * capacity] int32, each row's table, if keys of several
            tables may be equal; padding is 0.
        collected: a `CollectedKeys`, if the exchange has two stages.
    """

    rows: tf.Tensor
    places: tf.Tensor
    position: tf.Tensor
    num_rows: tf.Tensor
    capacity: tf.Tensor
    bucket: tf.Tensor
    table_of: tf.Tensor | None = None
    collected: Any = None


class CollectedKeys(NamedTuple):
    """One replica's keys for its group, if the exchange has two stages.

    Attributes:
        first: the first stage: keys from the replicas of its group.
        route: these keys, made unique.
        second: the second stage, of the unique keys.
    """

    first: ReceivedKeys
    route: Route
    second: ReceivedKeys


class RowExchange:
    """Exchanges keys, rows and gradients of groups of tables, in one stage.

    `groups` have, for each group, the tables' width and the wire of their rows;
    `wire` is that of gradients. Mappings are by the group's number. `replica`
    is the local replica that calls. All replicas must call together. A replica
    has `num_sizes` sizes.
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
        # For each group a channel per kind of message.
        self._channels = [replicas.allocate(4) for _ in groups]

    def route(
        self,
        replica: int,
        keys: tf.Tensor,
        training: bool,
        table_of: tf.Tensor | None = None,
        tables: int = 1,
    ) -> Route:
        """Finds where keys are sent first, as `messages.route` does."""
        operations = self._replicas.operations(replica, training)
        return operations.route(keys, self._replicas.world, table_of, tables)

    def sizes(self, routes: Mapping[int, Route]) -> list[tf.Tensor]:
        """Returns a replica's longest messages; all need the largest of all.

        They are `num_sizes` scalars int64, for any number of groups.
        """
        sizes = [tf.constant(0, tf.int64)] * self.num_sizes
        for i, routed in routes.items():
            counts = routed.counts
            if counts.shape[1] != 1:
                counts = tf.reduce_sum(counts, 1)
            sizes[i] = tf.reduce_max(counts)
        return sizes

    def send_keys(
        self,
        replica: int,
        routes: Mapping[int, Route],
        longest: tf.Tensor,
        training: bool,
    ) -> dict[int, ReceivedKeys]:
        """Sends keys to their shards; returns the others' requests.

        `longest`, int64, begins with the largest of all replicas' `sizes`.
        """
        operations = self._replicas.operations(replica, training)
        found = {}
        for i, routed in routes.items():
            world, tables = routed.counts.shape
            capacity, bucket = bucket_of(longest[i])
            message, position = operations.write_keys(routed, capacity)
            message = self._replicas.all_to_all(
                replica, message, self._channels[i] + KEYS, bucket
            )
            rows, table_of, places = operations.read_keys(message, tables)
            found[i] = ReceivedKeys(
                rows,
                places,
                position,
                world * capacity,
                capacity,
                bucket,
                table_of if tables > 1 else None,
            )
        return found

    def send(
        self,
        replica: int,
        received: Mapping[int, ReceivedKeys],
        values: Mapping[int, tf.Tensor],
        kind: int,
    ) -> dict[int, tf.Tensor]:
        """Sends rows, gradients or counts, which belong to keys.

        `ROWS` answers with the rows asked for, of the dtype sent, and returns
        the answers, [`num_rows`, dim]. A replica's own rows are rounded too: an
        id has one row on all.

        `GRADIENTS` sends the answers' gradients back, float32 or of the wire's
        dtype, rounded once per stage, and returns the rows' gradients, float32.

        `COUNTS` sends each unique key's occurrences, [u] int64, to its shard,
        and returns the counts of the rows asked for; padding is 0.
        """
        found = {}
        for i, asked in received.items():
            given = values[i]
            if kind == GRADIENTS:
                given = self._wire.encode(given)
            elif kind == COUNTS:
                place = asked.position[:, None]
                given = tf.scatter_nd(place, given, [asked.num_rows])
            width = given.shape[1:].as_list()
            shape = [self._replicas.world, asked.capacity, *width]
            sent = self._replicas.all_to_all(
                replica,
                tf.reshape(given, shape),
                self._channels[i] + kind,
                asked.bucket,
            )
            sent = tf.reshape(sent, [-1, *width])
            found[i] = self._wire.decode(sent) if kind == GRADIENTS else sent
        return found


class TwoStages(RowExchange):
    """Exchanges inside groups of neighbouring ranks, then between groups.

    Key k belongs to the replica of rank k % world, whose place in its group of
    `size` replicas is (k % world) % size. A replica asks the replica of that
    place in its own group, which asks the one of the same place in the key's
    group. Each stage sends quotients of keys, so that the second stage's keys
    follow from the first's. This class is the first stage, and owns the second.
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
    ) -> dict[int, ReceivedKeys]:
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
                collected=CollectedKeys(first, collected[i], second),
            )
            for (i, first), second in zip(
                firsts.items(), seconds.values(), strict=True
            )
        }

    def send(
        self,
        replica: int,
        received: Mapping[int, ReceivedKeys],
        values: Mapping[int, tf.Tensor],
        kind: int,
    ) -> dict[int, tf.Tensor]:
        stages = {i: each.collected for i, each in received.items()}
        firsts = {i: stage.first for i, stage in stages.items()}
        seconds = {i: stage.second for i, stage in stages.items()}
        if kind == ROWS:
            found = self._second.send(replica, seconds, values, kind)
            answers = {}
            for i, first in firsts.items():
                # Padding may have any row.
                place = tf.scatter_nd(
                    first.places[:, None],
                    tf.gather(seconds[i].position, stages[i].route.index),
                    [first.num_rows],
                )
                answers[i] = tf.gather(found[i], place)
            return super().send(replica, firsts, answers, kind)
        found = super().send(replica, firsts, values, kind)
        operations = self._replicas.operations(replica, training=True)
        sums = {}
        for i, first in firsts.items():
            _, route, second = stages[i]
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
    """Makes the exchange of a strategy's replicas; all workers must call."""
    size = first_stage(replicas.world, replicas.on_host)
    if size > 1:
        return TwoStages(replicas, groups, size, wire)
    return RowExchange(replicas, groups, wire)
