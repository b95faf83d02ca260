"""The decisions that the replicas of an engine make together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tensorflow as tf

from tfrs_embed.distribution import handshake
from tfrs_embed.distribution.consensus import ReplicaConsensus
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.ops.checks import EarlyLookup
from tfrs_embed.ops.validation import UncheckedIds

UPDATE = "an update"
NEW_KEYS = "the insertion of new keys"


class JointDecisions:
    """Decides with the other replicas about an engine's lookups and updates.

    Making one counts the engine: all workers make theirs in the same order.

    Args:
        name: the owner of the engine, for errors.
        strategy: the strategy of the replicas.
        replicas: the replicas.
        traffic: the counters of each local replica's communication.
        begin: see the method; None: the engine never can.
    """

    def __init__(
        self,
        name: str,
        strategy: tf.distribute.Strategy,
        replicas: Replicas,
        traffic: Sequence[tf.Variable],
        begin: Callable[[UncheckedIds, bool], EarlyLookup | None] | None,
    ) -> None:
        self._begin = begin
        self._name = name
        self._strategy = strategy
        self._replicas = replicas
        self._traffic = traffic
        self._number = replicas.count("layers")
        # Actions that workers have compared.
        self._compared: set[str] = set()

    def running(self) -> int | None:
        """Returns the local replica that is running; None: outside of any."""
        return self._replicas.current(self._name)

    @property
    def begins_early(self) -> bool:
        """Whether the consensus on ids does a part of the lookup."""
        return self._begin is not None

    def begin(self, ids: UncheckedIds, training: bool) -> EarlyLookup | None:
        """Begins a lookup before its ids are known to be valid, if possible.

        The replicas then agree on validity and on the lookup's sizes together.
        """
        return None if self._begin is None else self._begin(ids, training)

    def consensus(self, training: bool = False) -> ReplicaConsensus | None:
        """The consensus on a lookup's ids; None outside of replicas."""
        replica = self.running()
        if replica is not None:
            self._traffic[replica].assign_add([1, 0, 0])
        return self.on("a lookup for training" if training else "a lookup")

    def on(self, action: str) -> ReplicaConsensus | None:
        """The consensus on an action; None outside of replicas."""
        replica = self.running()
        if replica is None:
            return None
        self.compare(action)
        what = f"{action} of {self._name}"
        return ReplicaConsensus(self._replicas, replica, self._number, what)

    def all_agree(self, ok: tf.Tensor) -> tf.Tensor:
        """Whether a scalar bool is true on all replicas of a step."""
        consensus = self.on(UPDATE)
        return ok if consensus is None else consensus.agree(ok)[0]

    def compare(self, action: str) -> None:
        """Compares an action with the other workers', the first time.

        Raises:
            RuntimeError: they do something else.
        """
        if action not in self._compared:
            self._compared.add(action)
            what = f"{action} of {self._name}"
            handshake.compare_actions(self._strategy, what)
