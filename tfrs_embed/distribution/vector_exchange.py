"""The exchange of bags and vectors of tables that are sharded by row.

Every replica gets all replicas' bags, and sends back, for each bag, the sum of
the rows in its shard. So a bag costs a vector per shard, whatever its number of
ids: less than its rows, if bags have many ids and shards are few.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.distribution.agreement import Facts
from tfrs_embed.distribution.replicas import Replicas, bucket_of
from tfrs_embed.distribution.traffic import WORD, Collective, capacity_of
from tfrs_embed.distribution.wire import Wire
from tfrs_embed.ops import bag_matrix
from tfrs_embed.ops.bag_matrix import BagColumns
from tfrs_embed.ops.bags import BaggedIds, concat

# The channels, one per kind of message.
_BAGS, _VECTORS, _GRADIENTS = range(3)


def collectives(
    bags: int, words: int, floats: int, element: int
) -> list[Collective]:
    """Returns a step's collectives for all features exchanged by vectors.

    Args:
        bags: the most bags of a feature on any replica.
        words: the sum of the words of one bag of each feature.
        floats: the sum of the widths of the features' tables.
        element: the bytes of a number of vectors and gradients.
    """
    vectors = element * capacity_of(bags * floats)
    return [
        Collective("all_gather", WORD * capacity_of(bags * words)),
        Collective("all_to_all", vectors),
        Collective("all_gather", vectors),
    ]


class VectorsReceived(NamedTuple):
    """Requests to a replica.

    Attributes:
        features: the indices of the features exchanged by vectors.
        bags: for each of them all replicas' bags, rank after rank, with the ids
            of this replica's shard.
        rows: scalar int32, the bags of each rank, padding included.
    """

    features: list[int]
    bags: list[BaggedIds]
    rows: tf.Tensor


class VectorExchange:
    """Exchanges the bags, vectors and gradients of several features.

    `first_ranks` has the rank of each table's row 0, by table name. Vectors and
    gradients are sent in the wire's dtype. In methods `replica` is the local
    replica that calls, `bags` are those of all features, `mine` the indices of
    the features exchanged by vectors, and `received` is the result of
    `send_bags`.
    """

    def __init__(
        self,
        replicas: Replicas,
        name: str,
        features: Sequence[FeatureSpec],
        first_ranks: Mapping[str, int],
        wire: Wire,
    ) -> None:
        self._replicas = replicas
        self._channel = replicas.allocate(3)
        self._name = name
        self._features = tuple(features)
        self._first_ranks = first_ranks
        self._wire = wire

    def facts(
        self,
        mine: Sequence[int],
        bags: Sequence[BaggedIds],
        weighted: Sequence[bool],
    ) -> Facts:
        """Returns facts that must be equal on all replicas."""
        values = ["has another number of ids, or one not known"] * len(bags)
        for i in mine:
            weights = "with weights" if weighted[i] else "without weights"
            values[i] = f"has {bags[i].bag_size} ids in each bag, {weights}"
        return Facts(
            f"{self._name}: all replicas must give a feature bags of the same "
            "number of ids when tracing, or all of an unknown one. ",
            [str(feature) for feature in self._features],
            values,
        )

    def send_bags(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        mine: Sequence[int],
        most: tf.Tensor,
        training: bool,
    ) -> VectorsReceived:
        """Sends bags to all replicas; returns what they asked of this one.

        `most`, a scalar int64, is the most bags of a feature on any replica.
        """
        world, rank = self._replicas.world, self._replicas.ranks[replica]
        tables = [self._features[i].table for i in mine]
        columns = [_columns(bags[i]) for i in mine]
        rows = tf.cast(most, tf.int32)
        matrix = self._gather(
            replica,
            bag_matrix.pack([bags[i] for i in mine], columns, rows),
            rows,
            _BAGS,
        )
        operations = self._replicas.operations(replica, training)
        found = operations.ids_of_shard(
            matrix,
            columns,
            world,
            [(rank - self._first_ranks[t.name]) % world for t in tables],
        )
        for i in mine:
            unique = tf.size(bags[i].ids, tf.int64)
            self._replicas.sent[replica].add(unique=unique)
        return VectorsReceived([*mine], found, rows)

    def send_vectors(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        received: VectorsReceived,
        vectors: Sequence[tf.Tensor],
    ) -> dict[int, tf.Tensor]:
        """Answers bags with vectors, and sums up the answers that come.

        Each shard's vectors are rounded, this replica's too; the sum is
        float32. `vectors` are [world * rows, dim] for each feature, float32 or
        of the wire's dtype.

        Returns:
            The vectors of this replica's bags, [count, dim], by feature index.
        """
        world, rows = self._replicas.world, received.rows
        dims = [v.shape[1] for v in vectors]
        width = sum(dims)
        capacity, bucket = bucket_of(tf.cast(rows, tf.int64) * width)
        message = self._wire.encode(concat(vectors, 1))
        message = tf.reshape(message, [world, rows * width])
        message = tf.pad(message, [[0, 0], [0, capacity - rows * width]])
        message = self._replicas.all_to_all(
            replica, message, self._channel + _VECTORS, bucket
        )
        # Takes half of the time of a sum over the first dimension.
        total = tf.add_n(tf.unstack(self._wire.decode(message), world))
        total = total[: rows * width]
        total = tf.reshape(total, [rows, width])
        parts = tf.split(total, dims, 1) if len(dims) > 1 else [total]
        return {
            i: bags[i].scaled(part[: bags[i].count])
            for i, part in zip(received.features, parts, strict=True)
        }

    def send_gradients(
        self,
        replica: int,
        bags: Sequence[BaggedIds],
        received: VectorsReceived,
        gradients: Sequence[tf.Tensor],
    ) -> list[tf.Tensor]:
        """Sends the gradients of vectors to all replicas.

        `gradients` are those of all features, [count, dim] float32. Returns
        those of `received.bags`, [world * rows, dim].
        """
        rows = received.rows
        mine = [bags[i].scaled(gradients[i]) for i in received.features]
        dims = [g.shape[1] for g in mine]
        padded = [tf.pad(g, [[0, rows - tf.shape(g)[0]], [0, 0]]) for g in mine]
        matrix = self._wire.encode(concat(padded, 1))
        matrix = self._gather(replica, matrix, rows, _GRADIENTS)
        matrix = self._wire.decode(matrix)
        # Columns of one matrix, which kernels read without a copy.
        return tf.split(matrix, dims, 1) if len(dims) > 1 else [matrix]

    def _gather(
        self,
        replica: int,
        matrix: tf.Tensor,
        rows: tf.Tensor,
        channel: int,
    ) -> tf.Tensor:
        """Gathers matrices, [rows, width] each, as [world * rows, width]."""
        world, width = self._replicas.world, matrix.shape[1]
        # A channel's shape depends on the bucket only, whatever features a call
        # has.
        capacity, bucket = bucket_of(tf.cast(rows, tf.int64) * width)
        flat = tf.reshape(matrix, [-1])
        flat = tf.pad(flat, [[0, capacity - rows * width]])
        flat = self._replicas.gather(
            replica, flat, self._channel + channel, bucket
        )
        by_rank = tf.reshape(flat, [world, capacity])[:, : rows * width]
        return tf.reshape(by_rank, [world * rows, width])


def _columns(bags: BaggedIds) -> BagColumns:
    assert bags.bag_size is not None
    return BagColumns(bags.bag_size, bags.weights is not None)
