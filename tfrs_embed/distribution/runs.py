"""Runs of rows, moved as they lie in memory.

The kernels copy them. TensorFlow has no operation for it that GPUs have, too:
there each row is gathered by its place.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed.ops.parsed_ids import bag_of_id


def copy(
    module: Any, values: tf.Tensor, starts: tf.Tensor, sizes: tf.Tensor
) -> tf.Tensor:
    """Copies runs, one after the other.

    Args:
        module: the kernels' operations, or None.
        values: [m, ...] float32, bfloat16 or float16.
        starts: int32 of any shape, the first row of each run.
        sizes: int32 of that shape, the runs' rows.

    Returns:
        [n, ...]: n is the sum of the sizes.
    """
    if module:
        return module.tfrs_embed_copy_runs(
            values=values, starts=starts, sizes=sizes, capacity=0, padded=False
        )
    return tf.gather(values, _places(starts, sizes))


def pad(
    module: Any, values: tf.Tensor, lengths: tf.Tensor, capacity: tf.Tensor
) -> tf.Tensor:
    """Lays values out in rows of one length.

    Args:
        module: the kernels' operations, or None.
        values: [n, ...] float32, bfloat16 or float16, row after row.
        lengths: [rows] int32, how many each row has; they sum up to n.
        capacity: scalar int32, the length of a row.

    Returns:
        [rows, capacity, ...]; the rest of a row is zeros.
    """
    first = tf.cumsum(lengths, exclusive=True)
    if module:
        return module.tfrs_embed_copy_runs(
            values=values,
            starts=first,
            sizes=lengths,
            capacity=capacity,
            padded=True,
        )
    # A gather and no scatter, which takes four times as long for single words.
    place = tf.range(capacity)
    index = tf.where(
        place < lengths[:, None], first[:, None] + place, tf.shape(values)[0]
    )
    missing = tf.zeros([1, *values.shape[1:]], values.dtype)
    return tf.gather(tf.concat([values, missing], 0), index)


def read_splits(
    module: Any,
    words: tf.Tensor,
    starts: tf.Tensor,
    has_lengths: tf.Tensor,
    counts: tf.Tensor,
    numbers: tf.Tensor,
) -> tf.Tensor:
    """Where bags begin and end among the ids of their piece.

    Args:
        module: the kernels' operations, or None.
        words: [n] float32, messages.
        starts: [pieces, world] int32, where the lengths of the bags are that
            each source has of a piece.
        has_lengths: [pieces, world] int32, 0 where there are none: all these
            bags have one length.
        counts: [pieces, world] int32, the bags.
        numbers: [pieces, world] int32, the ids.

    Returns:
        [m] int32: of each piece, where its first bag begins, which is 0, and
        where all of them end, source after source.
    """
    if module:
        return module.tfrs_embed_read_splits(
            words=words,
            starts=starts,
            has_lengths=has_lengths,
            counts=counts,
            numbers=numbers,
        )
    bags = tf.reduce_sum(counts, 1)
    has_lengths, counts, numbers = (
        tf.reshape(each, [-1]) for each in (has_lengths, counts, numbers)
    )
    equal = _repeat(numbers // tf.maximum(counts, 1), counts)
    given = _repeat(tf.cast(has_lengths, tf.bool), counts)
    # Where there are none, what is there instead is not used.
    places = tf.minimum(_places(starts, counts), tf.size(words) - 1)
    read = tf.bitcast(tf.gather(words, places), tf.int32)
    ends = tf.concat([[0], tf.cumsum(tf.where(given, read, equal))], 0)
    first = tf.cumsum(bags, exclusive=True)
    before = _repeat(tf.gather(ends, first), bags + 1)
    return tf.gather(ends, _places(first, bags + 1)) - before


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
