"""What decides which keys have rows, and what is known of them."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

#: The row of a key that has none: it is read, never written, and zeros.
ABSENT = 0
#: The row that takes the gradients of keys without one, and is never read.
TRASH = 1
#: The first row that a key can have.
FIRST_ROW = 2


@dataclasses.dataclass(frozen=True)
class KeyRules:
    """When the keys of one shard get and lose rows.

    Attributes:
        capacity: the number of keys that have rows, at the beginning.
        max_capacity: what it may double up to; `capacity` if it may not.
        candidates: of how many keys without rows the occurrences are
            remembered; at least 1.
        threshold: a key gets a row once it occurred so often; 0: at once, if
            `probability` is 1.
        probability: a key without a row gets one with this probability each
            time it occurs.
        seed: of these probabilities, 64 bits.
        policy: the order of eviction. "lru": by the last use; "lfu": by
            frequency, then by the last use; "ttl": expired keys, then as "lru";
            "none": no order.
        ttl: with the policy "ttl" a key expires when it was not used in so
            many steps; else 0.
        evicts: whether keys that aren't expired are evicted too.
    """

    capacity: int
    max_capacity: int
    candidates: int
    threshold: int = 0
    probability: float = 1.0
    seed: int = 0
    policy: str = "none"
    ttl: int = 0
    evicts: bool = False


class Live(NamedTuple):
    """The keys that have rows, in any order.

    Attributes:
        keys: [n] int64.
        rows: [n] int64, each key's own.
        frequency: [n] int64, how often each was used.
        last_used: [n] int64, the step of its last use.
    """

    keys: np.ndarray
    rows: np.ndarray
    frequency: np.ndarray
    last_used: np.ndarray


class Candidates(NamedTuple):
    """The keys without rows that admission remembers, in any order.

    Attributes:
        keys: [n] int64.
        frequency: [n] int64, how often each was seen.
        last_seen: [n] int64, the step that saw it last.
    """

    keys: np.ndarray
    frequency: np.ndarray
    last_seen: np.ndarray
