"""The exchange of bags and their vectors, of tables that are sharded by row.

Every replica gets all replicas' bags, and sends back, for each bag, the sum of
those rows that its shard has. So a bag costs a vector from each shard, however
many ids it has. That is less than its rows where bags have many ids and shards
are few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.configs import TableSpec
from tfrs_embed.distribution.replicas import Replicas, bucket_of
from tfrs_embed.distribution.wire import Wire
from tfrs_embed.ops import backend, bag_matrix
from tfrs_embed.ops.bag_matrix import BagColumns
from tfrs_embed.ops.bags import BaggedIds

#: Collective channels that an exchange uses.
CHANNELS = 3


class VectorsReceived(NamedTuple):
    """What a replica was asked for.

    Attributes:
        bags: for each feature those of all replicas, rank after rank: of each
            bag the ids that this replica's shard has.
        rows: scalar int32, the bags of each rank, padding included.
        words: scalar int64, those of a message of bags.
        floats: scalar int64, the numbers of a message of vectors.
    """

    bags: list[BaggedIds]
    rows: tf.Tensor
    words: tf.Tensor
    floats: tf.Tensor


class VectorExchange:
    """Exchanges the bags, vectors and gradients of several features.

    Args:
        replicas: the replicas.
        channel: the first of `CHANNELS` collective channels.
        wire: what vectors and gradients are sent as; ids and weights are sent
            as they are.
    """

    def __init__(self, replicas: Replicas, channel: int, wire: Wire) -> None:
        self._replicas = replicas
        self._channel = channel
        self._wire = wire

    def send_bags(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        columns: Sequence[BagColumns],
        tables: Sequence[TableSpec],
        first_ranks: Mapping[str, int],
        most: tf.Tensor,
        device: str | None,
        training: bool,
    ) -> VectorsReceived:
        """Sends bags to all replicas.

        Args:
            replica: the local replica that calls.
            bags: each feature's bags.
            columns: their columns in messages.
            tables: their tables.
            first_ranks: the ranks that have the tables' rows 0, by name.
            most: scalar int64, the most bags that a feature has on any replica.
            device: where the shard is.
            training: whether this is part of a training step.

        Returns:
            What the others asked of this one.
        """
        rows = tf.cast(most, tf.int32)
        width = sum(c.width for c in columns)
        matrix, words = self._gather(
            replica, bag_matrix.pack(bags, columns, rows), rows, width, 0
        )
        found = backend.of(device, training).ids_of_shard(
            matrix,
            columns,
            self._replicas.world,
            [
                (self._replicas.ranks[replica] - first_ranks[t.name])
                % self._replicas.world
                for t in tables
            ],
        )
        floats, _ = bucket_of(most * sum(t.dim for t in tables))
        return VectorsReceived(found, rows, words, tf.cast(floats, tf.int64))

    def send_vectors(
        self,
        replica: int,
        received: VectorsReceived,
        vectors: Sequence[tf.Tensor],
        counts: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Answers with vectors, and adds up the answers that come.

        Each shard's is rounded by itself, this replica's too, and the sum is of
        float32.

        Args:
            replica: the local replica that calls.
            received: what `send_bags` returned.
            vectors: of each feature's bags there, [world * rows, dim], float32
                or of the wire's dtype.
            counts: how many bags each feature has on this replica.

        Returns:
            Of each feature the sums for this replica's bags, [count, dim].
        """
        world, rows = self._replicas.world, received.rows
        dims = [v.shape[1] for v in vectors]
        width = sum(dims)
        capacity, bucket = bucket_of(tf.cast(rows, tf.int64) * width)
        message = self._wire.encode(_beside(vectors))
        message = tf.reshape(message, [world, rows * width])
        message = tf.pad(message, [[0, 0], [0, capacity - rows * width]])
        message = self._replicas.all_to_all(
            replica, message, self._channel + 1, bucket
        )
        total = tf.reduce_sum(self._wire.decode(message), 0)[: rows * width]
        total = tf.reshape(total, [rows, width])
        parts = tf.split(total, dims, 1) if len(dims) > 1 else [total]
        return [p[:n] for p, n in zip(parts, counts, strict=True)]

    def send_gradients(
        self,
        replica: int,
        received: VectorsReceived,
        gradients: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Sends the gradients of vectors to all replicas.

        Args:
            replica: the local replica that calls.
            received: what `send_bags` returned.
            gradients: of each feature, [count, dim] float32.

        Returns:
            Of each feature, those of `received.bags`, [world * rows, dim].
        """
        rows = received.rows
        dims = [g.shape[1] for g in gradients]
        padded = [
            tf.pad(g, [[0, rows - tf.shape(g)[0]], [0, 0]]) for g in gradients
        ]
        matrix, _ = self._gather(
            replica, self._wire.encode(_beside(padded)), rows, sum(dims), 2
        )
        matrix = self._wire.decode(matrix)
        # As columns of one matrix, which kernels read without a copy.
        return tf.split(matrix, dims, 1) if len(dims) > 1 else [matrix]

    def _gather(
        self,
        replica: int,
        matrix: tf.Tensor,
        rows: tf.Tensor,
        width: int,
        channel: int,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Gathers the replicas' matrices, one below the other.

        Args:
            replica: the local replica that calls.
            matrix: [rows, width], float32 or what a wire has encoded.
            rows: scalar int32, the same on all replicas.
            width: the matrix's width.
            channel: the collective's channel, of this exchange's.

        Returns:
            [world * rows, width], and how many words each replica sent.
        """
        world = self._replicas.world
        # A channel's shapes follow from the bucket alone, whatever the features
        # of a call.
        capacity, bucket = bucket_of(tf.cast(rows, tf.int64) * width)
        flat = tf.reshape(matrix, [-1])
        flat = tf.pad(flat, [[0, capacity - rows * width]])
        flat = self._replicas.gather(
            replica, flat, self._channel + channel, bucket
        )
        by_rank = tf.reshape(flat, [world, capacity])[:, : rows * width]
        return (
            tf.reshape(by_rank, [world * rows, width]),
            tf.cast(capacity, tf.int64),
        )


def _beside(matrices: Sequence[tf.Tensor]) -> tf.Tensor:
    """Matrices beside each other."""
    return matrices[0] if len(matrices) == 1 else tf.concat(matrices, 1)
