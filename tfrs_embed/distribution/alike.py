"""Facts that must be the same on all replicas, for their messages to fit.

Where replicas differ in them, the largest and the smallest checksum of them
differ too, and all of the replicas know.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.distribution.replicas import BUCKETS, Replicas

# Of a text, this many characters reach the other replicas.
_LENGTH = 1024
#: Collective channels that `agreed_max` uses.
CHANNELS = 2


class Facts(NamedTuple):
    """Facts about the messages of one replica.

    Attributes:
        rule: what all replicas must do, for the facts to be the same.
        names: what errors call that of which each fact is.
        values: the facts; as many on each replica.
    """

    rule: str
    names: Sequence[str]
    values: Sequence[str]

    @property
    def checksum(self) -> tf.Tensor:
        """Numbers whose largest are opposite if all replicas' are the same."""
        number = zlib.crc32(repr([*self.values]).encode())
        return tf.constant([number, -number], tf.int64)


def gather_texts(
    replicas: Replicas, replica: int, texts: Sequence[Any], channel: int
) -> tf.Tensor:
    """Gathers texts of all replicas.

    Args:
        replicas: the replicas.
        replica: the local one that calls.
        texts: its texts, of which `_LENGTH` characters are sent.
        channel: the collective's channel.

    Returns:
        [world, texts] strings, by rank.
    """
    # Collectives carry numbers only.
    codes = tf.strings.unicode_decode(tf.stack(texts), "UTF-8")
    codes = codes.to_tensor(shape=[len(texts), _LENGTH])
    bucket = min(len(texts), BUCKETS - 1)
    sent = tf.cast(codes, tf.float32)
    found = replicas.gather(replica, sent, channel, bucket)
    encoded = tf.strings.unicode_encode(tf.cast(found, tf.int32), "UTF-8")
    found = tf.strings.regex_replace(encoded, r"\x00+$", "")
    return tf.reshape(found, [replicas.world, len(texts)])


def first_difference(texts: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The place of the first text that differs between replicas, and a rank.

    Args:
        texts: [world, n], by rank.

    Returns:
        The place, and the rank of the first replica that has another text there
        than that of rank 0; scalars int64.
    """
    differs = tf.cast(tf.not_equal(texts, texts[:1]), tf.int32)
    place = tf.argmax(tf.reduce_max(differs, 0))
    return place, tf.argmax(differs[:, place])


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
        channel: that of `gather_texts`.
        result: what it returns, to TensorFlow.

    Returns:
        The result, which does not exist when running.

    Raises:
        tf.errors.InvalidArgumentError: says which fact differs.
    """
    texts = gather_texts(replicas, replica, facts.values, channel)
    place, rank = first_difference(texts)
    text = tf.strings.join(
        [
            f"{facts.rule} ",
            tf.gather([*facts.names], place),
            " has ",
            texts[0, place],
            " on the replica of rank 0, and ",
            texts[rank, place],
            " on that of rank ",
            tf.strings.as_string(rank),
            ".",
        ]
    )
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
