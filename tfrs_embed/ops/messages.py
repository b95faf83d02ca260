"""Messages of keys and rows between replicas, in TensorFlow's operations."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.ops.bags import repeat


class Route(NamedTuple):
    """A replica's unique keys, sorted by the shard that holds their rows.

    Attributes:
        index: [n] int32, each key's index among the unique keys.
        row: [u] int64, the unique keys' rows on their shards.
        owner: [u] int32, the unique keys' shards, ascending.
        counts: [world, tables] int64, each shard's number of unique keys of
            each table. A shard's keys are sorted by table.
    """

    index: tf.Tensor
    row: tf.Tensor
    owner: tf.Tensor
    counts: tf.Tensor


def route(
    keys: tf.Tensor,
    world: int,
    table_of: tf.Tensor | None = None,
    tables: int = 1,
) -> Route:
    """Finds each key's shard, key % world, and row there, key // world.

    Keys are [n] int64. With `table_of`, [n] int32, equal keys of different
    tables stay apart.
    """
    unique, index = tf.unique(keys)
    if world == tables == 1:
        size = tf.size(unique)
        return Route(
            index,
            unique,
            tf.zeros([size], tf.int32),
            tf.cast(size, tf.int64)[None, None],
        )
    pile = tf.cast(tf.math.floormod(unique, world), tf.int32)
    if table_of is not None:
        size = tf.maximum(tf.size(unique, tf.int64), 1)
        pairs, index = tf.unique(
            tf.cast(table_of, tf.int64) * size + tf.cast(index, tf.int64)
        )
        place = tf.math.floormod(pairs, size)
        unique, pile = tf.gather(unique, place), tf.gather(pile, place)
        pile = pile * tables + tf.cast(pairs // size, tf.int32)
    # Not partitioned, which would make a tensor for each shard.
    by_pile = tf.argsort(pile, stable=True)
    pile = tf.gather(pile, by_pile)
    return Route(
        tf.gather(tf.math.invert_permutation(by_pile), index),
        tf.math.floordiv(tf.gather(unique, by_pile), world),
        pile // tables,
        counts_of(pile, world, tables),
    )


def counts_of(piles: tf.Tensor, world: int, tables: int = 1) -> tf.Tensor:
    """Counts ascending piles, shard * tables + table: [world, tables] int64."""
    firsts = tf.searchsorted(piles, tf.range(world * tables + 1))
    firsts.set_shape([world * tables + 1])
    return tf.reshape(
        tf.cast(firsts[1:] - firsts[:-1], tf.int64), [world, tables]
    )


def write_keys(
    routed: Route, capacity: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Writes keys into messages with room for `capacity` keys each.

    Returns:
        [world, tables + capacity] int64, messages that begin with each table's
        number of keys; and the keys' positions in the answers, [u] int32.
    """
    # An answer has no numbers of keys, so positions differ from the message's.
    world, tables = routed.counts.shape
    counts = tf.reduce_sum(routed.counts, 1)
    first = tf.cast(tf.cumsum(counts, exclusive=True), tf.int32)
    shift = tf.range(world) * capacity - first
    position = tf.range(tf.size(routed.row)) + tf.gather(shift, routed.owner)
    heads = tf.range(world)[:, None] * (capacity + tables) + tf.range(tables)
    behind = position + (routed.owner + 1) * tables
    message = tf.scatter_nd(
        tf.concat([tf.reshape(heads, [-1]), behind], 0)[:, None],
        tf.concat([tf.reshape(routed.counts, [-1]), routed.row], 0),
        [world * (capacity + tables)],
    )
    return tf.reshape(message, [world, capacity + tables]), position


def read_keys(
    message: tf.Tensor, tables: int = 1
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Reads messages that `write_keys` wrote.

    Returns:
        The keys' rows, [world * capacity] int64; each one's table, int32, or
        [0] without tables; and the positions of real keys, [m] int32.
    """
    ends = tf.cumsum(message[:, :tables], axis=1)
    capacity = tf.shape(message)[1] - tables
    mask = tf.sequence_mask(ends[:, -1], capacity)
    rows, flat = (
        tf.reshape(each, [-1]) for each in (message[:, tables:], mask)
    )
    table_of = tf.zeros([0], tf.int32)
    if tables > 1:
        here = tf.range(capacity, dtype=tf.int64)[None, None, :]
        passed = tf.cast(here >= ends[:, :, None], tf.int32)
        table_of = tf.where(mask, tf.reduce_sum(passed, 1), 0)
        table_of = tf.reshape(table_of, [-1])
    return rows, table_of, tf.cast(tf.where(flat)[:, 0], tf.int32)


def copy_runs(
    values: tf.Tensor, starts: tf.Tensor, sizes: tf.Tensor
) -> tf.Tensor:
    """Copies runs of values' rows, one after the other: [sum of sizes, ...].

    `starts` and `sizes`, int32 of one shape, are the runs' first rows and
    numbers of rows.
    """
    # TensorFlow has no operation for runs that also has a kernel for GPUs.
    return tf.gather(values, _places(starts, sizes))


def pad_runs(
    values: tf.Tensor, lengths: tf.Tensor, capacity: tf.Tensor
) -> tf.Tensor:
    """Pads runs of values with zeros: [runs, capacity, ...].

    `lengths`, [runs] int32, are the runs' numbers of rows, in the values'
    order.
    """
    first = tf.cumsum(lengths, exclusive=True)
    # A scatter of single words takes four times as long as this gather.
    place = tf.range(capacity)
    index = tf.where(
        place < lengths[:, None], first[:, None] + place, tf.shape(values)[0]
    )
    missing = tf.zeros([1, *values.shape[1:]], values.dtype)
    return tf.gather(tf.concat([values, missing], 0), index)


def read_splits(
    words: tf.Tensor,
    starts: tf.Tensor,
    has_lengths: tf.Tensor,
    counts: tf.Tensor,
    numbers: tf.Tensor,
) -> tf.Tensor:
    """Reads from messages where bags begin and end among their piece's ids.

    Args:
        words: [n] float32, messages.
        starts: the position of the lengths of each source's bags of a piece.
            This and the following are [pieces, world] int32.
        has_lengths: 0 if these bags have one length.
        counts: the numbers of bags.
        numbers: the numbers of ids.

    Returns:
        [m] int32: for each piece 0, then each bag's end, source after source.
    """
    bags = tf.reduce_sum(counts, 1)
    has_lengths, counts, numbers = (
        tf.reshape(each, [-1]) for each in (has_lengths, counts, numbers)
    )
    equal = repeat(numbers // tf.maximum(counts, 1), counts)
    given = repeat(tf.cast(has_lengths, tf.bool), counts)
    # Words read where there are no lengths are not used.
    places = tf.minimum(_places(starts, counts), tf.size(words) - 1)
    read = tf.bitcast(tf.gather(words, places), tf.int32)
    ends = tf.concat([[0], tf.cumsum(tf.where(given, read, equal))], 0)
    first = tf.cumsum(bags, exclusive=True)
    before = repeat(tf.gather(ends, first), bags + 1)
    return tf.gather(ends, _places(first, bags + 1)) - before


def _places(starts: tf.Tensor, sizes: tf.Tensor) -> tf.Tensor:
    """Returns the positions in runs, one run after the other, [n] int32."""
    starts, sizes = tf.reshape(starts, [-1]), tf.reshape(sizes, [-1])
    run = repeat(tf.range(tf.size(sizes)), sizes)
    shift = starts - tf.cumsum(sizes, exclusive=True)
    return tf.gather(shift, run) + tf.range(tf.size(run))
