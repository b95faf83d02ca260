"""One verdict of all replicas, about their inputs and their actions.

Each call of a layer begins with a verdict, and all verdicts of a strategy are
the same collective. So replicas that call layers in different orders meet in a
verdict, which raises an error, and not in different exchanges, where each would
wait for the other.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfrs_embed.distribution import agreement
from tfrs_embed.distribution.agreement import Facts
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.ops.checks import EarlyLookup

#: The most sizes in a verdict: all verdicts of a strategy have one shape.
MOST_SIZES = 12


@dataclasses.dataclass(frozen=True)
class ReplicaConsensus:
    """Decides together with the other replicas of a strategy.

    Attributes:
        replicas: the replicas.
        replica: the local one that decides.
        number: the layer's, because several layers may have one name.
        doing: the layer, for errors.
    """

    replicas: Replicas
    replica: int
    number: int
    doing: str

    def agree(
        self, ok: tf.Tensor, early: EarlyLookup | None = None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Whether `ok` on all replicas; fails if they call different layers.

        Also returns the largest of all replicas' sizes of `early`, [sizes]
        int64. There are at most `MOST_SIZES`.
        """
        bad = tf.cast(tf.logical_not(ok), tf.int64)
        sizes = early.sizes if early else []
        padding = [tf.constant(0, tf.int64)] * (MOST_SIZES - len(sizes))
        order = Facts(
            "All replicas must call the same layers in the same order; these "
            "wait for each other",
            ["", ""],
            [f"in {self.doing}", f"in {self.doing}, number {self.number}"],
        )
        worst = agreement.agreed_max(
            self.replicas,
            self.replica,
            [bad, *sizes, *padding],
            [order, early.facts] if early else [order],
            self.replicas.verdict_channel,
        )
        return worst[0] < 1, worst[1 : 1 + len(sizes)]

    def text(self, text: tf.Tensor) -> tf.Tensor:
        """Returns the first non-empty text of the replicas' scalar strings."""
        channel = self.replicas.verdict_channel
        texts = agreement.gather_texts(
            self.replicas, self.replica, [text], channel
        )[:, 0]
        rank = tf.argmax(tf.cast(tf.not_equal(texts, ""), tf.int32))
        said = ["On the replica of rank ", tf.strings.as_string(rank), ": "]
        return tf.strings.join([*said, texts[rank]])
