"""Messages of bags, to replicas that hold pieces of tables.

A message begins with a head for each piece. Then, for all pieces in turn, come
the lengths of bags if they differ, ids of 32 bits, and weights.
So a few operations read all pieces of one kind.

Messages consist of float32 words, which GPUs move and send; they don't do so
with int32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.ops.bags import (
    BaggedIds,
    map_bag_sizes,
    num_rows,
    of_one_dtype,
)
from tfrs_embed.ops.stock import Stock

#: The words of a head: whether lengths follow, the number of bags, the number
#: of ids, one spare.
HEAD = 4


class Piece(NamedTuple):
    """A feature's share on one replica.

    Attributes:
        feature: the feature's index.
        table: its table's name.
        rank: the rank of the replica that holds these columns.
        width: the number of columns.
    """

    feature: int
    table: str
    rank: int
    width: int


class Written(NamedTuple):
    """Messages of pieces.

    Attributes:
        words: [n] float32, the messages, rank after rank.
        counts: [pieces] int32, the bags of each piece.
        sizes: [pieces] int32, the words of each piece, its head included.
    """

    words: tf.Tensor
    counts: tf.Tensor
    sizes: tf.Tensor


def piece_words(bags: Any, ids: Any, has_lengths: Any, weighted: Any) -> Any:
    """Returns the words of a piece; arguments are numbers or tensors.

    `has_lengths` is 1 if bags' lengths are sent, because they differ, else 0.
    `weighted` is 1 if ids have weights, else 0.
    """
    return HEAD + has_lengths * bags + (1 + weighted) * ids


def write(pieces: Sequence[Piece], bags: Sequence[BaggedIds]) -> Written:
    """Writes messages of each feature's bags for pieces, sorted by rank."""
    used = {p.feature: bags[p.feature] for p in pieces}
    # By feature first: a feature may have several pieces.
    has_lengths = tf.constant([int(not b.even) for b in used.values()])
    counts = tf.stack([b.count for b in used.values()])
    numbers = num_rows([b.ids for b in used.values()])
    weighted = tf.constant([int(b.weights is not None) for b in used.values()])
    sizes = piece_words(counts, numbers, has_lengths, weighted)
    heads = tf.stack([has_lengths, counts, numbers, tf.zeros_like(counts)], 1)
    places = {feature: place for place, feature in enumerate(used)}
    of_piece = tf.constant([places[p.feature] for p in pieces])
    heads = tf.reshape(tf.gather(heads, of_piece), [-1])
    parts = [
        _lengths_as_words(used),
        _ids_as_words(used),
        {
            i: tf.cast(b.weights, tf.float32)
            for i, b in used.items()
            if b.weights is not None
        },
    ]
    of_rank: dict[int, list[int]] = {}
    for piece in pieces:
        of_rank.setdefault(piece.rank, []).append(piece.feature)
    words = []
    for head, features in zip(
        tf.split(
            tf.bitcast(heads, tf.float32),
            [HEAD * len(each) for each in of_rank.values()],
        ),
        of_rank.values(),
        strict=True,
    ):
        words.append(head)
        words += [part[i] for part in parts for i in features if i in part]
    return Written(
        tf.concat(words, 0),
        tf.gather(counts, of_piece),
        tf.gather(sizes, of_piece),
    )


def read(
    operations: Stock,
    mine: Sequence[Piece],
    bags: Sequence[BaggedIds],
    message: tf.Tensor,
    words: tf.Tensor,
) -> tuple[list[BaggedIds], tf.Tensor]:
    """Reads messages, [world, words] float32, for the pieces of this replica.

    Messages have weights for the features whose `bags` here have weights.

    Returns:
        Each piece's bags; and how many came from each replica, [pieces, world]
        int32.
    """
    world = message.shape[0]
    if not mine:
        return [], tf.zeros([0, world], tf.int32)
    heads = tf.bitcast(message[:, : HEAD * len(mine)], tf.int32)
    heads = tf.reshape(heads, [world, len(mine), HEAD])
    # Each [pieces here, world].
    has_lengths, counts, numbers, _ = tf.unstack(tf.transpose(heads, [2, 1, 0]))
    places = range(len(mine))
    weighted = [i for i in places if bags[mine[i].feature].weights is not None]
    of_weighted = tf.gather(numbers, tf.constant(weighted, tf.int32))
    sizes = [has_lengths * counts, numbers, of_weighted]
    # In the order of `write`.
    starts = tf.cumsum(tf.concat(sizes, 0), 0, exclusive=True)
    starts += tf.range(world) * words + HEAD * len(mine)
    starts = tf.split(starts, [len(mine), len(mine), len(weighted)])
    flat = tf.reshape(message, [-1])
    splits = operations.read_splits(
        flat, starts[0], has_lengths, counts, numbers
    )
    ids, of_weights = (
        _words(operations, flat, start, size)
        for start, size in zip(starts[1:], sizes[1:], strict=True)
    )
    weights = dict(zip(weighted, of_weights, strict=True))
    totals = tf.reduce_sum(counts, 1)
    found = [
        BaggedIds(
            tf.bitcast(ids[i], tf.int32),
            None,
            weights.get(i),
            None,
            count,
            shape,
            tf.TensorShape([None]),
            tf.TensorShape([None]),
            splits=of_piece,
        )
        for i, (count, shape, of_piece) in enumerate(
            zip(
                tf.unstack(totals),
                tf.unstack(totals[:, None]),
                tf.split(splits, totals + 1),
                strict=True,
            )
        )
    ]
    return found, counts


def _lengths_as_words(bags: dict[int, BaggedIds]) -> dict[int, tf.Tensor]:
    """Returns bags' lengths as float32 words, [count], where they differ."""
    splits = {i: b.splits for i, b in bags.items() if b.splits is not None}
    found = {}
    if splits:
        lengths = map_bag_sizes(
            lambda sizes: tf.bitcast(sizes, tf.float32), [*splits.values()]
        )
        found = dict(zip(splits, lengths, strict=True))
    for i, b in bags.items():
        if b.splits is None and b.bag_ids is not None:
            ones = tf.ones_like(b.bag_ids)
            lengths = tf.math.unsorted_segment_sum(ones, b.bag_ids, b.count)
            found[i] = tf.bitcast(lengths, tf.float32)
    return found


def _ids_as_words(bags: dict[int, BaggedIds]) -> dict[int, tf.Tensor]:
    """Returns features' ids as float32 words, one per id."""
    ids = of_one_dtype([b.ids for b in bags.values()])
    words = tf.bitcast(tf.cast(tf.concat(ids, 0), tf.int32), tf.float32)
    parts = tf.split(words, num_rows(ids), num=len(ids))
    return dict(zip(bags, parts, strict=True))


def _words(
    operations: Stock, flat: tf.Tensor, starts: tf.Tensor, sizes: tf.Tensor
) -> list[tf.Tensor]:
    """Returns each piece's words, source after source.

    `starts` and `sizes`, [pieces, world] int32, say where the words of each
    source begin in `flat`, and how many they are.
    """
    if sizes.shape[0] == 0:
        return []
    words = operations.copy_runs(flat, starts, sizes)
    found: list[tf.Tensor] = tf.split(words, tf.reduce_sum(sizes, 1))
    return found
