"""One verdict of all replicas, about their inputs and their actions.

Each call of a layer begins with a verdict, and all verdicts of a strategy are
the same collective. So replicas that call layers in different orders meet in a
verdict, which raises an error, and not in different exchanges, where each would
wait for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.distribution import agreement
from tfrs_embed.distribution.agreement import Facts
from tfrs_embed.distribution.replicas import Replicas

#: The most sizes in a verdict: all verdicts of a strategy have one shape.
MOST_SIZES = 12


class Preparation(NamedTuple):
    """A lookup that begins before its ids are known to be valid.

    Attributes:
        tensors: the tensors that the rest of the lookup takes.
        sizes: up to `MOST_SIZES` scalars int64, of which the lookup needs the
            largest of all replicas'.
        facts: facts that must be equal on all replicas.
        finish: takes the tensors, and the largest sizes, [sizes] int64, which
            exist if the ids are valid; returns a value for the rest of the
            lookup.
    """

    tensors: list[tf.Tensor]
    sizes: list[tf.Tensor]
    facts: Facts
    finish: Callable[[list[tf.Tensor], tf.Tensor], Any]


#: Begins a lookup; see `ReplicaConsensus.prepare`. None: it can't begin yet.
Prepare = Callable[
    [Sequence[Any], Sequence[Any], Sequence[bool]], Preparation | None
]


class ReplicaConsensus:
    """Decides together with the other replicas of a strategy.

    Errors name the layer as `doing`; `number` is the layer's, because several
    layers may have one name. `prepare` begins the lookup that is decided on;
    None: there is none.

    Attributes:
        begun: the lookup that `prepare` began; None before `prepared`.
    """

    def __init__(
        self,
        replicas: Replicas,
        replica: int,
        number: int,
        doing: str,
        prepare: Prepare | None = None,
    ) -> None:
        self._replicas = replicas
        self._replica = replica
        self._number = number
        self._doing = doing
        self._prepare = prepare
        self._preparation: Preparation | None = None
        self._longest: Any = None
        self.begun: Any = None

    def prepare(
        self,
        features: Sequence[Any],
        bags: Sequence[Any],
        weighted: Sequence[bool],
    ) -> list[tf.Tensor]:
        """Begins a lookup before its ids are known to be valid.

        The replicas then agree on the lookup's sizes and on validity at once.
        Bags come without weights and scales, and ids may be out of range.
        Returns tensors for `prepared`, to be guarded by all conditions.
        """
        if self._prepare is not None:
            self._preparation = self._prepare(features, bags, weighted)
        return self._preparation.tensors if self._preparation else []

    def prepared(self, tensors: Sequence[tf.Tensor]) -> None:
        """Takes the tensors of `prepare`, guarded by all conditions."""
        if self._preparation is not None:
            self.begun = self._preparation.finish(list(tensors), self._longest)

    def holds(self, ok: tf.Tensor) -> tf.Tensor:
        """Whether `ok` on all replicas; fails if they call different layers."""
        bad = tf.cast(tf.logical_not(ok), tf.int64)
        begun = self._preparation
        sizes = begun.sizes if begun else []
        padding = [tf.constant(0, tf.int64)] * (MOST_SIZES - len(sizes))
        order = Facts(
            "All replicas must call the same layers in the same order; these "
            "wait for each other",
            ["", ""],
            [f"in {self._doing}", f"in {self._doing}, number {self._number}"],
        )
        worst = agreement.agreed_max(
            self._replicas,
            self._replica,
            [bad, *sizes, *padding],
            [order, begun.facts] if begun else [order],
            self._replicas.verdict_channel,
        )
        self._longest = worst[1 : 1 + len(sizes)]
        return worst[0] < 1

    def text(self, text: tf.Tensor) -> tf.Tensor:
        """Returns the first non-empty text of the replicas' scalar strings."""
        channel = self._replicas.verdict_channel
        texts = agreement.gather_texts(
            self._replicas, self._replica, [text], channel
        )[:, 0]
        rank = tf.argmax(tf.cast(tf.not_equal(texts, ""), tf.int32))
        said = ["On the replica of rank ", tf.strings.as_string(rank), ": "]
        return tf.strings.join([*said, texts[rank]])
