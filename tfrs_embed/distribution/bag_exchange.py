"""Bags of ids sent to the replicas that hold their tables' columns.

A replica sends each feature's bags to all replicas that hold columns of its
table; these look them up, and send one vector for each bag back. All features
and widths travel in one collective each way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.distribution import alike
from tfrs_embed.distribution.alike import Facts, longest_if_alike
from tfrs_embed.distribution.replicas import Replicas, bucket_of
from tfrs_embed.distribution.wire import Wire
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.parsed_ids import bag_of_id

#: Collective channels that an exchange uses.
CHANNELS = 3 + alike.CHANNELS
#: The words that a piece's message begins with: whether it has the bags'
#: lengths, how many bags and how many ids it has, and one to spare.
HEAD = 4


class Piece(NamedTuple):
    """A feature's share on one replica.

    Attributes:
        feature: the feature's place among all.
        table: its table's name.
        rank: the rank of the replica that holds these columns.
        width: their number.
        wide: whether ids take 64 bits.
    """

    feature: int
    table: str
    rank: int
    width: int
    wide: bool


class BagsReceived(NamedTuple):
    """What a replica was asked for, and the layout of what it asked for.

    Attributes:
        bags: of each piece that this replica holds, the bags that all replicas
            ask for, rank after rank.
        counts: [pieces here, world] int32, how many each replica asks for.
        sizes: [pieces] int32, the words that this replica asks with for each
            piece.
        floats: [pieces] int32, how many numbers each piece's vectors have, of
            those that this replica asks for, in units.
        capacity: scalar int32, the units of a message of vectors.
        bucket: scalar int32, the capacity's number.
        words: scalar int64, those of the longest message of bags.
    """

    bags: list[BaggedIds]
    counts: tf.Tensor
    sizes: tf.Tensor
    floats: tf.Tensor
    capacity: tf.Tensor
    bucket: tf.Tensor
    words: tf.Tensor


class BagExchange:
    """Exchanges the bags, vectors and gradients of all pieces.

    Args:
        replicas: the replicas.
        channel: the first of `CHANNELS` collective channels.
        pieces: the pieces of all features on all replicas.
        name: whose they are, for errors.
        features: what errors call each feature.
        wire: what vectors and gradients are sent as; ids and weights are sent
            as they are.
    """

    def __init__(
        self,
        replicas: Replicas,
        channel: int,
        pieces: Sequence[Piece],
        name: str,
        features: Sequence[str],
        wire: Wire,
    ) -> None:
        self._replicas = replicas
        self._wire = wire
        self._channel = channel
        self._name = name
        self._features = tuple(features)
        #: In the order of messages: by rank, then by feature.
        self.pieces = sorted(pieces, key=lambda p: (p.rank, p.feature))
        self._ranks = tf.constant([p.rank for p in self.pieces])
        #: The most numbers that all pieces' vectors are made of: they are moved
        #: so many at a time.
        self.unit = math.gcd(*(p.width for p in self.pieces))

    def here(self, replica: int) -> list[Piece]:
        """The pieces that a local replica holds, in the order of messages."""
        rank = self._replicas.ranks[replica]
        return [p for p in self.pieces if p.rank == rank]

    def send_bags(
        self, replica: int, bags: Sequence[BaggedIds]
    ) -> BagsReceived:
        """Sends bags to the replicas that hold their tables' columns.

        Args:
            replica: the local replica that calls.
            bags: each feature's bags.

        Returns:
            What the others asked of this one.

        Raises:
            tf.errors.InvalidArgumentError: other replicas have weights for
                other features.
        """
        used = sorted({p.feature for p in self.pieces})
        bodies = {i: _body(bags[i], self._is_wide(i)) for i in used}
        heads = {i: _head(bags[i]) for i in used}
        sizes = tf.stack([tf.size(bodies[p.feature]) for p in self.pieces])
        sizes += HEAD
        floats = tf.stack([bags[p.feature].count for p in self.pieces])
        floats *= tf.constant([p.width // self.unit for p in self.pieces])
        words_to = self._by_rank(sizes)
        longest = longest_if_alike(
            self._replicas,
            replica,
            [
                tf.cast(tf.reduce_max(each), tf.int64)
                for each in (words_to, self._by_rank(floats))
            ],
            Facts(
                [bags[i].weights is not None for i in used],
                lambda place, weighted: self._unlike(used, place, weighted),
            ),
            self._channel,
        )
        words, number = bucket_of(longest[0])
        capacity, bucket = bucket_of(longest[1])
        values = []
        for rank in sorted({p.rank for p in self.pieces}):
            of_rank = [p.feature for p in self.pieces if p.rank == rank]
            values += [heads[i] for i in of_rank]
            values += [bodies[i] for i in of_rank]
        message = pad(tf.concat(values, 0), words_to, words)
        message = self._replicas.all_to_all(
            replica, message, self._channel + 2, number
        )
        received, counts = self._read(replica, message, words, bags)
        return BagsReceived(
            received, counts, sizes, floats, capacity, bucket, longest[0]
        )

    def _unlike(
        self, used: Sequence[int], place: tf.Tensor, weighted: tf.Tensor
    ) -> tf.Tensor:
        """Says that replicas differ in what has weights.

        Args:
            used: the features.
            place: the place of the first of them that differs.
            weighted: [world] int64, whether it has weights, by rank.
        """
        return tf.strings.join(
            [
                f"{self._name}: all replicas must give weights to the same "
                "features in a step. ",
                tf.gather([self._features[i] for i in used], place),
                " has weights on the replica of rank ",
                tf.strings.as_string(tf.argmax(weighted)),
                " and none on that of rank ",
                tf.strings.as_string(tf.argmin(weighted)),
                ".",
            ]
        )

    def _is_wide(self, feature: int) -> bool:
        return any(p.wide for p in self.pieces if p.feature == feature)

    def _by_rank(self, sizes: tf.Tensor) -> tf.Tensor:
        """Sums sizes of pieces, [pieces] int32, by rank: [world] int32."""
        return tf.math.unsorted_segment_sum(
            sizes, self._ranks, self._replicas.world
        )

    def _read(
        self,
        replica: int,
        message: tf.Tensor,
        words: tf.Tensor,
        bags: Sequence[BaggedIds],
    ) -> tuple[list[BaggedIds], tf.Tensor]:
        """Reads the bags of the messages that came, [world, words] float32.

        Returns:
            Each piece's bags, and [pieces here, world] int32, their numbers.
        """
        world, mine = self._replicas.world, self.here(replica)
        if not mine:
            return [], tf.zeros([0, world], tf.int32)
        heads = tf.bitcast(message[:, : HEAD * len(mine)], tf.int32)
        heads = tf.reshape(heads, [world, len(mine), HEAD])
        flat = tf.reshape(message, [-1])
        # Of each source's message, the part that is read next.
        place = tf.range(world) * words + HEAD * len(mine)
        found = []
        for i, piece in enumerate(mine):
            has_lengths, count, n = (heads[:, i, j] for j in range(3))
            lengths = _lengths(flat, place, has_lengths, count, n)
            place += has_lengths * count
            size = 2 * n if piece.wide else n
            ids = tf.bitcast(_take(flat, place, size), tf.int32)
            if piece.wide:
                ids = tf.bitcast(tf.reshape(ids, [-1, 2]), tf.int64)
            place += size
            weights = None
            if bags[piece.feature].weights is not None:
                weights = _take(flat, place, n)
                place += n
            found.append(_bags(ids, lengths, weights))
        return found, tf.transpose(heads[:, :, 1])

    def send_vectors(
        self, replica: int, received: BagsReceived, vectors: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Answers with vectors.

        Args:
            replica: the local replica that calls.
            received: what `send_bags` returned.
            vectors: of each piece that this replica holds, [count, width],
                float32 or of the wire's dtype.

        Returns:
            Of each of `pieces`, those of this replica's bags, [count, width]
            float32. Its own pieces' are rounded as the others' are.
        """
        world = self._replicas.world
        units = self._units(replica, received)
        values = self._in_units(vectors)
        if len(vectors) > 1:
            # From piece after piece to replica after replica.
            starts = tf.cumsum(tf.reshape(units, [-1]), exclusive=True)
            starts = tf.transpose(tf.reshape(starts, [-1, world]))
            places = _places(starts, tf.transpose(units))
            values = tf.gather(values, places)
        message = pad(values, tf.reduce_sum(units, 0), received.capacity)
        message = self._replicas.all_to_all(
            replica, message, self._channel + 3, received.bucket
        )
        flat = tf.reshape(self._wire.decode(message), [-1, self.unit])
        first = self._ranks * received.capacity
        first += self._before_in_rank(received.floats)
        return [
            tf.reshape(
                flat[first[i] : first[i] + received.floats[i]],
                [-1, piece.width],
            )
            for i, piece in enumerate(self.pieces)
        ]

    def send_gradients(
        self, replica: int, received: BagsReceived, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Sends the gradients of vectors to where these came from.

        Args:
            replica: the local replica that calls.
            received: what `send_bags` returned.
            gradients: of each of `pieces`, [count, width].

        Returns:
            Of each piece that this replica holds, those of all replicas' bags,
            [count, width].
        """
        message = pad(
            self._in_units(gradients),
            self._by_rank(received.floats),
            received.capacity,
        )
        message = self._replicas.all_to_all(
            replica, message, self._channel + 4, received.bucket
        )
        mine = self.here(replica)
        if not mine:
            return []
        units = self._units(replica, received)
        flat = tf.reshape(self._wire.decode(message), [-1, self.unit])
        first = tf.range(self._replicas.world) * received.capacity
        starts = tf.cumsum(units, 0, exclusive=True) + first
        values = tf.gather(flat, _places(starts, units))
        parts = tf.split(values, tf.reduce_sum(units, 1))
        return [
            tf.reshape(part, [-1, piece.width])
            for part, piece in zip(parts, mine, strict=True)
        ]

    def _units(self, replica: int, received: BagsReceived) -> tf.Tensor:
        """The units that each replica's vectors take, [pieces here, world]."""
        widths = [p.width // self.unit for p in self.here(replica)]
        return received.counts * tf.constant(widths, tf.int32, [len(widths), 1])

    def _in_units(self, values: Sequence[tf.Tensor]) -> tf.Tensor:
        """Values, one after the other: [n, unit], as they are sent."""
        rows = [tf.reshape(v, [-1, self.unit]) for v in values]
        return self._wire.encode(
            tf.concat(rows, 0) if rows else tf.zeros([0, self.unit])
        )

    def _before_in_rank(self, sizes: tf.Tensor) -> tf.Tensor:
        """Of each piece, the sizes of those before it on its replica."""
        before = tf.cumsum(sizes, exclusive=True)
        ranks = [p.rank for p in self.pieces]
        return before - tf.gather(before, [ranks.index(r) for r in ranks])


def pad(
    values: tf.Tensor, lengths: tf.Tensor, capacity: tf.Tensor
) -> tf.Tensor:
    """Lays values out in rows of one length.

    Args:
        values: [n, ...], row after row.
        lengths: [rows] int32, how many each row has; they sum up to n.
        capacity: scalar int32, the length of a row.

    Returns:
        [rows, capacity, ...]; the rest of a row is zeros.
    """
    # A gather and no scatter, which takes four times as long for single words;
    # and no RaggedTensor, which GPUs have no operation for.
    place = tf.range(capacity)
    first = tf.cumsum(lengths, exclusive=True)
    index = tf.where(
        place < lengths[:, None], first[:, None] + place, tf.shape(values)[0]
    )
    missing = tf.zeros([1, *values.shape[1:]], values.dtype)
    return tf.gather(tf.concat([values, missing], 0), index)


def _head(bags: BaggedIds) -> tf.Tensor:
    """The head of a feature's message: [HEAD] words."""
    has_lengths = tf.constant(0 if bags.even else 1)
    head = [has_lengths, bags.count, tf.size(bags.ids), tf.constant(0)]
    return tf.bitcast(tf.stack(head), tf.float32)


def _body(bags: BaggedIds, wide: bool) -> tf.Tensor:
    """The rest of a feature's message: [n] words."""
    # As float32, which GPUs move and send as they do rows; int32 they don't.
    words = []
    if bags.splits is not None:
        words.append(tf.cast(bags.splits[1:] - bags.splits[:-1], tf.int32))
    elif bags.bag_ids is not None:
        ones = tf.ones_like(bags.bag_ids)
        words.append(
            tf.math.unsorted_segment_sum(ones, bags.bag_ids, bags.count)
        )
    if wide:
        ids = tf.bitcast(tf.cast(bags.ids, tf.int64), tf.int32)
        words.append(tf.reshape(ids, [-1]))
    else:
        words.append(tf.cast(bags.ids, tf.int32))
    parts = [tf.bitcast(each, tf.float32) for each in words]
    if bags.weights is not None:
        parts.append(tf.cast(bags.weights, tf.float32))
    return tf.concat(parts, 0)


def _places(starts: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
    """The places of runs, one run after the other: [n] int32.

    Args:
        starts: int32 of any shape, the first place of each run.
        sizes: int32 of that shape, the runs' lengths; they sum up to n.
    """
    starts, sizes = tf.reshape(starts, [-1]), tf.reshape(sizes, [-1])
    run = _repeat(tf.range(tf.size(sizes)), sizes)
    shift = starts - tf.cumsum(sizes, exclusive=True)
    return tf.gather(shift, run) + tf.range(tf.size(run))


def _repeat(values: tf.Tensor, counts: tf.Tensor) -> tf.Tensor:
    """Each value as often as its count says, as `tf.repeat` has it."""
    # That takes the memory of all counts being the largest.
    splits = tf.concat([[0], tf.cumsum(counts)], 0)
    return tf.gather(values, bag_of_id(splits))


def _take(flat: tf.Tensor, starts: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
    """Runs of a message's words, one after the other."""
    return tf.gather(flat, _places(starts, sizes))


def _lengths(
    flat: tf.Tensor,
    place: tf.Tensor,
    has_lengths: tf.Tensor,
    count: tf.Tensor,
    n: tf.Tensor,
) -> tf.Tensor:
    """The lengths of all sources' bags, [sum of count] int32.

    Args:
        flat: all sources' messages.
        place: [world] int32, where each source's lengths are.
        has_lengths: [world] int32, 0 where all its bags have one length.
        count: [world] int32, its bags.
        n: [world] int32, its ids.
    """
    equal = _repeat(n // tf.maximum(count, 1), count)
    given = _repeat(tf.cast(has_lengths, tf.bool), count)
    # Where there are none, what is there instead is not used.
    places = tf.minimum(_places(place, count), tf.size(flat) - 1)
    words = tf.bitcast(tf.gather(flat, places), tf.int32)
    return tf.where(given, words, equal)


def _bags(
    ids: tf.Tensor, lengths: tf.Tensor, weights: tf.Tensor | None
) -> BaggedIds:
    """Bags of these lengths, whose vectors are weighted sums."""
    count = tf.size(lengths)
    splits = tf.concat([[0], tf.cumsum(lengths)], 0)
    return BaggedIds(
        ids,
        None,
        weights,
        None,
        count,
        count[None],
        tf.TensorShape([None]),
        tf.TensorShape([None]),
        splits=splits,
    )
