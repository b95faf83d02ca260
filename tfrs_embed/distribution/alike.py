"""The longest of the replicas' messages, and whether all send the same kind.

Both are found by one collective: where replicas differ in what they send, the
largest and the smallest checksum of it differ too, and all of them know.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfrs_embed.distribution.replicas import Replicas

#: Collective channels that `longest_if_alike` uses.
CHANNELS = 2


def longest_if_alike(
    replicas: Replicas,
    replica: int,
    sizes: Sequence[tf.Tensor],
    facts: Sequence[int],
    channel: int,
    text: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
) -> tf.Tensor:
    """The largest of the replicas' sizes, where their facts are equal.

    Args:
        replicas: the replicas.
        replica: the local one that calls.
        sizes: scalars, int64; as many on all replicas.
        facts: numbers below 2^24 that must be the same on all replicas, as
            many on each.
        channel: the first of `CHANNELS` collective channels.
        text: words the error, given the first fact that differs, scalar int64,
            and its value on each rank, [world] int64.

    Returns:
        [sizes] int64.

    Raises:
        tf.errors.InvalidArgumentError: the facts differ.
    """
    number = zlib.crc32(repr(tuple(facts)).encode())
    checksum = tf.constant([number, -number], tf.int64)
    longest = replicas.max(
        replica, tf.concat([tf.stack(sizes), checksum], 0), channel
    )
    if replicas.world == 1:
        return longest[:-2]

    # An assertion that is not in a branch of its replica's own collectives
    # would wait for those of other replicas, which wait for this one.
    def fail() -> tf.Tensor:
        by_rank = replicas.gather(
            replica, tf.constant([list(facts)], tf.float32), channel + 1
        )
        differs = tf.not_equal(
            tf.reduce_max(by_rank, 0), tf.reduce_min(by_rank, 0)
        )
        first = tf.argmax(tf.cast(differs, tf.int32))
        values = tf.cast(by_rank[:, first], tf.int64)
        failed = tf.debugging.Assert(False, [text(first, values)])
        with tf.control_dependencies([failed] if failed else []):
            return tf.zeros([len(sizes)], tf.int64)

    return tf.cond(
        tf.equal(longest[-2], -longest[-1]), lambda: longest[:-2], fail
    )
