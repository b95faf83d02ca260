"""One verdict on all replicas' inputs."""

from __future__ import annotations

import tensorflow as tf

from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.ops.checks import Consensus

#: Collective slots that a consensus uses.
SLOTS = 2

# Of an error's text, this many characters reach the other replicas.
_LENGTH = 1024


class ReplicaConsensus(Consensus):
    """Lets the replicas of a strategy decide together.

    Args:
        replicas: the replicas.
        replica: the local one that decides.
        slot: the first of `SLOTS` collective slots.
    """

    def __init__(self, replicas: Replicas, replica: int, slot: int) -> None:
        self._replicas = replicas
        self._replica = replica
        self._slot = slot

    def holds(self, ok: tf.Tensor) -> tf.Tensor:
        """See the base class."""
        bad = tf.cast(tf.logical_not(ok), tf.int64)[None]
        return self._replicas.max(self._replica, bad, self._slot)[0] < 1

    def text(self, text: tf.Tensor) -> tf.Tensor:
        """See the base class."""
        # Collectives carry numbers only.
        codes = tf.strings.unicode_decode(text, "UTF-8")[:_LENGTH]
        codes = tf.pad(codes, [[0, _LENGTH - tf.size(codes)]])
        sent = tf.reshape(tf.cast(codes, tf.float32), [1, _LENGTH])
        texts = self._replicas.gather(self._replica, sent, self._slot + 1)
        speaking = tf.where(texts[:, 0] > 0)[:, 0]
        codes = tf.cast(texts[speaking[0]], tf.int32)
        said = tf.strings.unicode_encode(
            tf.boolean_mask(codes, codes > 0), "UTF-8"
        )
        rank = tf.strings.as_string(speaking[0])
        return tf.strings.join(["On the replica of rank ", rank, ": ", said])
