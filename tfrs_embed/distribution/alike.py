"""Facts that must be the same on all replicas, for their messages to fit.

Where replicas differ in them, the largest and the smallest checksum of them
differ too, and all of the replicas know.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.distribution.replicas import Replicas

#: Collective channels that `agreed_max` uses.
CHANNELS = 2


class Facts(NamedTuple):
    """Facts about the messages of one replica.

    Attributes:
        values: numbers below 2^24, as many on each replica.
        text: words the error, given the first fact that differs, scalar int64,
            and its value on each rank, [world] int64.
    """

    values: Sequence[int]
    text: Callable[[tf.Tensor, tf.Tensor], tf.Tensor]

    @property
    def checksum(self) -> tf.Tensor:
        """Numbers whose largest are opposite if all replicas' are the same."""
        number = zlib.crc32(repr([int(v) for v in self.values]).encode())
        return tf.constant([number, -number], tf.int64)


def fail(
    replicas: Replicas,
    replica: int,
    facts: Facts,
    channel: int,
    result: tf.Tensor,
) -> tf.Tensor:
    """Fails as the replicas' facts differ, on all of them.

    It belongs into a branch that only their checksums open: an assertion
    elsewhere would wait for those of other replicas, which wait for this one.

    Args:
        replicas: the replicas.
        replica: the local one that calls.
        facts: its facts.
        channel: a channel of its own.
        result: what it returns, to TensorFlow.

    Returns:
        The result, which does not exist when running.

    Raises:
        tf.errors.InvalidArgumentError: says which fact differs.
    """
    values = tf.constant([[float(v) for v in facts.values]], tf.float32)
    by_rank = replicas.gather(replica, values, channel)
    differs = tf.not_equal(tf.reduce_max(by_rank, 0), tf.reduce_min(by_rank, 0))
    first = tf.argmax(tf.cast(differs, tf.int32))
    text = facts.text(first, tf.cast(by_rank[:, first], tf.int64))
    failed = tf.debugging.Assert(False, [text])
    with tf.control_dependencies([failed] if failed else []):
        return tf.identity(result)


def agreed_max(
    replicas: Replicas,
    replica: int,
    sizes: Sequence[tf.Tensor],
    facts: Facts,
    channel: int,
) -> tf.Tensor:
    """The largest of the replicas' sizes, where their facts are equal.

    Args:
        replicas: the replicas.
        replica: the local one that calls.
        sizes: scalars, int64; as many on all replicas.
        facts: the replica's facts.
        channel: the first of `CHANNELS` collective channels.

    Returns:
        [sizes] int64.

    Raises:
        tf.errors.InvalidArgumentError: the facts differ.
    """
    longest = replicas.max(
        replica, tf.concat([tf.stack(sizes), facts.checksum], 0), channel
    )
    if replicas.world == 1:
        return longest[:-2]
    return tf.cond(
        tf.equal(longest[-2], -longest[-1]),
        lambda: longest[:-2],
        lambda: fail(replicas, replica, facts, channel + 1, longest[:-2]),
    )
