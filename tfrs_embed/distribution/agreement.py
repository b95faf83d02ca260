"""Facts that must be equal on all replicas, so that their messages fit.

Each replica sends a checksum of its facts, and its negative, in a max
collective: where replicas differ, the largest and the smallest checksum differ.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.distribution.replicas import BUCKETS, Replicas

# This many bytes of a text are sent.
_LENGTH = 1024
# The text of each byte; texts are padded with zeros.
_BYTES = [b"", *(bytes([i]) for i in range(1, 256))]


class Facts(NamedTuple):
    """Facts about the messages of one replica.

    Attributes:
        rule: the error's first words: what all replicas must do.
        names: what errors call the subject of each fact.
        values: the facts, each the predicate of "the replica of rank 0 ...";
            equally many on each replica.
    """

    rule: str
    names: Sequence[str]
    values: Sequence[str]


def gather_texts(
    replicas: Replicas, replica: int, texts: Sequence[Any], channel: int
) -> tf.Tensor:
    """Gathers `_LENGTH` bytes of texts of all replicas, by rank.

    Returns [world, texts] strings.
    """
    # Collectives send numbers only.
    sent = tf.io.decode_raw(tf.stack(texts), tf.uint8, fixed_length=_LENGTH)
    bucket = min(len(texts), BUCKETS - 1)
    found = replicas.gather(replica, tf.cast(sent, tf.float32), channel, bucket)
    codes = tf.cast(found, tf.int32)
    found = tf.strings.reduce_join(tf.gather(_BYTES, codes), -1)
    # The last character may be cut.
    found = tf.strings.unicode_transcode(
        found, "UTF-8", "UTF-8", errors="ignore"
    )
    return tf.reshape(found, [replicas.world, len(texts)])


def agreed_max(
    replicas: Replicas,
    replica: int,
    sizes: Sequence[tf.Tensor],
    facts: Sequence[Facts],
    channel: int,
) -> tf.Tensor:
    """Returns the largest of all replicas' sizes, [sizes] int64.

    All replicas give equally many sizes, scalars int64, and equally many of the
    first facts; where these are equal, of the next too. The channel must not be
    used otherwise; texts have other buckets.

    Raises:
        tf.errors.InvalidArgumentError: facts differ. The error names the first
            one that does, and the first rank that differs from rank 0.
    """
    checksum = zlib.crc32(repr([[*each.values] for each in facts]).encode())
    both = tf.constant([checksum, -checksum], tf.int64)
    longest = replicas.max(
        replica, tf.concat([tf.stack(sizes), both], 0), channel
    )
    # The assertion is in a branch: outside it would wait for the assertions of
    # other replicas, which wait for this one.
    return tf.cond(
        tf.equal(longest[-2], -longest[-1]),
        lambda: longest[:-2],
        lambda: _fail(replicas, replica, facts, channel, longest[:-2]),
    )


def _fail(
    replicas: Replicas,
    replica: int,
    facts: Sequence[Facts],
    channel: int,
    result: tf.Tensor,
) -> tf.Tensor:
    """Raises the error of `agreed_max`; returns `result`, for the branch."""
    first, *more = facts
    texts = gather_texts(replicas, replica, first.values, channel)

    def fail() -> tf.Tensor:
        with tf.device("CPU:0"):
            difference = functools.partial(_difference, first)
            text = tf.numpy_function(difference, [texts], tf.string)
        failed = tf.debugging.Assert(False, [text])
        with tf.control_dependencies([failed] if failed else []):
            return tf.identity(result)

    if not more:
        return fail()
    return tf.cond(
        tf.reduce_any(tf.not_equal(texts, texts[:1])),
        fail,
        lambda: _fail(replicas, replica, more, channel, result),
    )


def _difference(facts: Facts, texts: np.ndarray) -> bytes:
    """Names the first fact that differs, and the first rank where it does."""
    differs = np.argwhere((texts != texts[0]).T).tolist()
    fact, rank = differs[0] if differs else (0, 0)
    begin = f"{facts.rule}{facts.names[fact]}: the replica of rank 0 ".encode()
    values = texts[0, fact], rank, texts[rank, fact]
    return begin + b"%s, that of rank %d %s." % values
