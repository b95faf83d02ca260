"""The collectives of a training step, and the longest of their messages.

The exchanges of `distribution` and `engines` say which collectives they launch
for messages of given sizes. All replicas send messages of the size of the
longest one. `prediction` has the expected sizes.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np

from tfrs_embed.distribution.traffic import Collective

FLOAT = 4  # Bytes of a number of a row, and of one that is sent unless told.


@dataclasses.dataclass(frozen=True)
class StepTraffic:
    """The collectives of a step, besides the consensus on all features' ids.

    Attributes:
        replicas: the number of replicas.
        messages: the collectives.
    """

    replicas: int
    messages: tuple[Collective, ...]

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes that a replica sends."""
        return sum(each.sent(self.replicas) for each in self.messages)

    @functools.cached_property
    def passed_bytes(self) -> int:
        """Bytes that a replica sends and, in all-gathers, passes on."""
        gathered = sum(m.size for m in self.messages if m.kind == "all_gather")
        return self.bytes + (self.replicas - 2) * gathered

    @functools.cached_property
    def rounds(self) -> int:
        """How many times a replica sends a message to each other replica."""
        rounds = {"max": 0, "all_reduce": 2}  # A ring goes around twice.
        return sum(rounds.get(each.kind, 1) for each in self.messages)

    @property
    def collectives(self) -> int:
        """The number of collectives, with the consensus on ids."""
        return len(self.messages) + (self.replicas > 1)


@functools.lru_cache(maxsize=65536)
def longest_message(mean: float, messages: int) -> int:
    """The length that none of some messages exceeds in half of the steps.

    A message has those of an owner's rows that occur in a batch. Their number
    is taken for a Poisson variable, which varies a little more.
    """
    if mean <= 0:
        return 0
    low = int(mean)
    k = np.arange(low, int(mean + 12 * math.sqrt(mean) + 40))
    logarithms = np.log(np.maximum(k, 1)).cumsum() - math.log(max(low, 1))
    p = np.exp(k * math.log(mean) - mean - math.lgamma(low + 1) - logarithms)
    more = np.cumsum(p[::-1])[::-1] - p  # P(length > k)
    return int(k[more * messages <= math.log(2)][0])
