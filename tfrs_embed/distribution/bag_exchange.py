"""The exchange of bags with the replicas that hold their tables' columns.

A replica sends a feature's bags to all replicas that hold columns of its table.
These look the bags up, and send back one vector per bag. All features and
widths share one collective each way.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.distribution import bag_messages
from tfrs_embed.distribution.agreement import Facts, agreed_max
from tfrs_embed.distribution.bag_messages import Piece
from tfrs_embed.distribution.replicas import Replicas, bucket_of
from tfrs_embed.distribution.traffic import WORD, Collective, capacity_of
from tfrs_embed.distribution.wire import Wire
from tfrs_embed.ops.bags import BaggedIds

# The channels, one per kind of message.
_SIZES, _BAGS, _VECTORS, _GRADIENTS = range(4)


def unit_of(widths: Iterable[int]) -> int:
    """Returns the unit in which vectors are moved: all widths are multiples."""
    return math.gcd(*widths)


def collectives(
    words: float, floats: float, unit: int, element: int
) -> list[Collective]:
    """Returns a step's collectives for all slices of all tables.

    Args:
        words: the words of the longest message of ids.
        floats: the numbers of the longest message of vectors.
        unit: the result of `unit_of`.
        element: the bytes of a number of vectors and gradients.
    """
    vectors = element * unit * capacity_of(int(floats) // unit)
    return [
        Collective("max"),
        Collective("all_to_all", WORD * capacity_of(int(words))),
        Collective("all_to_all", vectors),
        Collective("all_to_all", vectors),
    ]


class BagsReceived(NamedTuple):
    """Requests to a replica, and the layout of its own request.

    Attributes:
        bags: for each piece of this replica, all replicas' bags, rank after
            rank.
        counts: [pieces here, world] int32, how many bags each replica asks for.
        floats: [pieces] int32, how many units each piece's vectors for this
            replica have.
        capacity: scalar int32, the units of a message of vectors.
        bucket: scalar int32, the capacity's number.
    """

    bags: list[BaggedIds]
    counts: tf.Tensor
    floats: tf.Tensor
    capacity: tf.Tensor
    bucket: tf.Tensor


class BagExchange:
    """Exchanges the bags, vectors and gradients of all features' pieces.

    `name` and `features` are for errors. Vectors and gradients are sent in the
    wire's dtype. In methods `replica` is the local replica that calls, and
    `received` is the result of `send_bags`.
    """

    def __init__(
        self,
        replicas: Replicas,
        pieces: Sequence[Piece],
        name: str,
        features: Sequence[str],
        wire: Wire,
    ) -> None:
        self._replicas = replicas
        self._wire = wire
        self._channel = replicas.allocate(4)
        self._name = name
        self._features = tuple(features)
        #: In the order of messages.
        self.pieces = sorted(pieces, key=lambda p: (p.rank, p.feature))
        self._ranks = tf.constant([p.rank for p in self.pieces])
        self.unit = unit_of(p.width for p in self.pieces)

    def local_pieces(self, replica: int) -> list[Piece]:
        """Returns a local replica's pieces, in the order of messages."""
        rank = self._replicas.ranks[replica]
        return [p for p in self.pieces if p.rank == rank]

    def send_bags(
        self, replica: int, bags: Sequence[BaggedIds], training: bool
    ) -> BagsReceived:
        """Sends each feature's bags to the replicas with its table's columns.

        Raises:
            tf.errors.InvalidArgumentError: other replicas have weights for
                other features.
        """
        used = sorted({p.feature for p in self.pieces})
        written = bag_messages.write(self.pieces, bags)
        floats = written.counts * tf.constant(
            [p.width // self.unit for p in self.pieces]
        )
        words_to = self._by_rank(written.sizes)
        longest = agreed_max(
            self._replicas,
            replica,
            [
                tf.cast(tf.reduce_max(each), tf.int64)
                for each in (words_to, self._by_rank(floats))
            ],
            [
                Facts(
                    f"{self._name}: all replicas must give weights to the same "
                    "features in a step. ",
                    [self._features[i] for i in used],
                    [
                        "has no weights"
                        if bags[i].weights is None
                        else "has weights"
                        for i in used
                    ],
                ),
            ],
            self._channel + _SIZES,
        )
        words, number = bucket_of(longest[0])
        capacity, bucket = bucket_of(longest[1])
        operations = self._replicas.operations(replica, training)
        message = operations.pad_runs(written.words, words_to, words)
        message = self._replicas.all_to_all(
            replica, message, self._channel + _BAGS, number
        )
        received, counts = bag_messages.read(
            operations, self.local_pieces(replica), bags, message, words
        )
        self._replicas.sent[replica].add(
            unique=tf.add_n([tf.size(b.ids, tf.int64) for b in bags])
        )
        return BagsReceived(received, counts, floats, capacity, bucket)

    def _by_rank(self, sizes: tf.Tensor) -> tf.Tensor:
        """Sums sizes of pieces, [pieces] int32, by rank: [world] int32."""
        return tf.math.unsorted_segment_sum(
            sizes, self._ranks, self._replicas.world
        )

    def send_vectors(
        self,
        replica: int,
        received: BagsReceived,
        vectors: list[tf.Tensor],
        training: bool,
    ) -> dict[tuple[int, int], tf.Tensor]:
        """Answers bags with vectors; returns those of this replica's own bags.

        `vectors` are [count, width] for each piece here, float32 or of the
        wire's dtype.

        Returns:
            By each piece's feature and rank, [count, width] float32. Pieces of
            this replica are rounded like the others.
        """
        world = self._replicas.world
        operations = self._replicas.operations(replica, training)
        units = self._units(replica, received)
        values = self._in_units(vectors)
        if len(vectors) > 1:
            # From the order of pieces to the order of replicas.
            starts = tf.cumsum(tf.reshape(units, [-1]), exclusive=True)
            starts = tf.transpose(tf.reshape(starts, [-1, world]))
            values = operations.copy_runs(values, starts, tf.transpose(units))
        message = operations.pad_runs(
            values, tf.reduce_sum(units, 0), received.capacity
        )
        message = self._replicas.all_to_all(
            replica, message, self._channel + _VECTORS, received.bucket
        )
        # From each replica its pieces' vectors, then its padding.
        sizes = tf.concat(
            [
                received.floats,
                received.capacity - self._by_rank(received.floats),
            ],
            0,
        )
        order: list[int] = []
        for rank in range(world):
            order += [i for i, p in enumerate(self.pieces) if p.rank == rank]
            order.append(len(self.pieces) + rank)
        parts = tf.split(
            tf.reshape(self._wire.decode(message), [-1, self.unit]),
            tf.gather(sizes, order),
        )
        return {
            (p.feature, p.rank): _of_width(parts[i + p.rank], p.width)
            for i, p in enumerate(self.pieces)
        }

    def send_gradients(
        self,
        replica: int,
        received: BagsReceived,
        gradients: dict[tuple[int, int], tf.Tensor],
    ) -> list[tf.Tensor]:
        """Sends vectors' gradients back to where the vectors came from.

        `gradients` are [count, width], by each piece's feature and rank.
        Returns, for each piece here, those of all replicas' bags.
        """
        operations = self._replicas.operations(replica, training=True)
        message = operations.pad_runs(
            self._in_units([gradients[p.feature, p.rank] for p in self.pieces]),
            self._by_rank(received.floats),
            received.capacity,
        )
        message = self._replicas.all_to_all(
            replica, message, self._channel + _GRADIENTS, received.bucket
        )
        mine = self.local_pieces(replica)
        if not mine:
            return []
        units = self._units(replica, received)
        flat = tf.reshape(self._wire.decode(message), [-1, self.unit])
        first = tf.range(self._replicas.world) * received.capacity
        starts = tf.cumsum(units, 0, exclusive=True) + first
        values = operations.copy_runs(flat, starts, units)
        parts = tf.split(values, tf.reduce_sum(units, 1))
        return [
            _of_width(part, piece.width)
            for part, piece in zip(parts, mine, strict=True)
        ]

    def _units(self, replica: int, received: BagsReceived) -> tf.Tensor:
        """Returns the units of replicas' vectors, [pieces here, world]."""
        widths = [p.width // self.unit for p in self.local_pieces(replica)]
        return received.counts * tf.constant(widths, tf.int32, [len(widths), 1])

    def _in_units(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Encodes values, one after the other, as [n, unit]."""
        rows = [_of_width(v, self.unit) for v in values]
        return self._wire.encode(
            tf.concat(rows, 0) if rows else tf.zeros([0, self.unit])
        )


def _of_width(values: tf.Tensor, width: int) -> tf.Tensor:
    """Reshapes values to rows of a width."""
    if values.shape.rank == 2 and values.shape[1] == width:
        return values
    return tf.reshape(values, [-1, width])
