"""The rules by which the keys of a shard get and lose rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tfrs_embed.configs.dynamic_keys import (
    CANDIDATES_PER_ROW,
    DecayingFrequency,
    KeysOfShards,
    Span,
    TimeToLive,
)
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.storage import initial_key_values

#: The row of keys without a row: zeros, read and never written.
ABSENT = 0
#: The row for gradients of keys without a row: written and never read.
TRASH = 1
#: The first row of keys, if keys without a row share none; else of these rows.
FIRST_ROW = 2
#: Rows with this number and greater ones are in a spill: see `spill`.
SPILLED = 2**48

# Extra rows, for reservations in a full table: one per 32 rows, or, in small
# tables, as many as rows, up to a limit.
_SPARE_PART = 32
_MOST_SPARE_OF_SMALL = 1024
# If no key is evicted, a shard has this many standard deviations more rows than
# the average number of keys of a shard.
_DEVIATIONS = 6
# Beyond the range of row indices.
_UNLIMITED = 2**40
_BITS = 2**64 - 1
# Half-lives are counted up to this number.
_MOST_NUMBER = 2**41 - 64


class LiveKeys(NamedTuple):
    """Keys and what is known of each, arrays or tensors.

    Attributes:
        keys: [n] int64.
        rows: [n] int64, each key's row; None: it is not known, or not wanted.
        frequency: [n] int64, how often each key was used; with the policy
            "score" the number of its score: see `key_scores`.
        last_used: [n] int64, the moment of each key's last use: the step's
            number, or the time, as the table's rules say.
    """

    keys: Any
    rows: Any
    frequency: Any
    last_used: Any

    def select(self, chosen: np.ndarray) -> LiveKeys:
        """Returns some of the keys, by their indices or by [n] bool."""
        some = (None if v is None else v[chosen] for v in self)
        return LiveKeys(*some)


@dataclasses.dataclass(frozen=True)
class KeyRules:
    """When the keys of one shard get and lose rows.

    A moment is the number of a step, or its time in microseconds since 1970.

    Attributes:
        capacity: the number of keys that can have rows, at first.
        max_capacity: the most to which the capacity may double.
        candidates: for how many keys without rows occurrences are remembered;
            at least 1.
        threshold: a key gets a row after this many occurrences; 0: at the
            first, with `probability`.
        probability: the probability that a key without a row gets one when it
            occurs.
        seed: the seed of these draws, 64 bits.
        policy: the order of eviction. "lru": by the last use; "lfu": by
            frequency, then by the last use; "decay": as "lfu", by frequencies
            that decay; "score": by the score that the program gives, then by
            the last use; "none": no order.
        ttl: a key expires this long after its last use, and expired keys go
            first; 0: none expires.
        half_life: with the policy "decay", frequencies are halved at each
            multiple of this number; else 0.
        by_time: whether moments are times.
        evicts: whether keys that have not expired are evicted too.
        floor: to so many keys a step evicts that has to evict, when the
            capacity is the largest; 0: it evicts as few as it has to.
        spills: whether evicted keys' rows go to a file.
        fallback_rows: how many rows of all shards keys without a row share; 0:
            they have none.
        world: the number of shards.
    """

    capacity: int
    max_capacity: int
    candidates: int
    threshold: int = 0
    probability: float = 1.0
    seed: int = 0
    policy: str = "none"
    ttl: int = 0
    half_life: int = 0
    by_time: bool = False
    evicts: bool = False
    floor: int = 0
    spills: bool = False
    fallback_rows: int = 0
    world: int = 1

    @property
    def scored(self) -> bool:
        """Whether a key has a score in the place of its frequency."""
        return self.policy == "score"

    @property
    def room(self) -> int:
        """For how many keys there is room; a spill's file has its own limit."""
        return SPILLED if self.spills else self.max_capacity

    @property
    def fallback_rows_here(self) -> int:
        """How many of the shared rows are on this shard."""
        return self.fallback_rows // self.world

    @property
    def least(self) -> int:
        """How many keys are left after a step that evicts at full capacity."""
        return self.floor or self.max_capacity

    def admits(self, key: int, occurrences: int, step: int) -> bool:
        """Whether a key without a row gets one in a step."""
        if self.threshold:
            return occurrences >= self.threshold
        if self.probability == 1:
            return True
        bits = _mix((self.seed & _BITS) ^ _mix(key & _BITS))
        uniform = (_mix(bits + step) >> 11) * 2.0**-53
        return bool(uniform < 1 - (1 - self.probability) ** occurrences)

    def later(self, frequency: int, then: int, now: int) -> int:
        """Returns what a frequency has become since a moment."""
        if not self.half_life or now <= then:
            return frequency
        halvings = now // self.half_life - then // self.half_life
        return frequency >> min(halvings, 63)

    def grown(self, capacity: int, keys: int) -> int:
        """Returns the capacity for so many keys, or the largest allowed."""
        while capacity < keys and capacity < self.max_capacity:
            capacity = min(2 * capacity, self.max_capacity)
        return capacity


def key_rules(table: TableSpec, world: int) -> KeyRules:
    """Returns the rules for one of `world` shards of a table with keys.

    Raises:
        ValueError: the shards can't have equally many fallback rows.
    """
    keys = table.keys
    assert keys is not None
    fallback_rows = keys.fallback_rows or 0
    if fallback_rows % world:
        raise ValueError(
            f"Table '{table.name}': fallback_rows={fallback_rows} can't be "
            f"divided evenly among {world} replicas. Take a multiple of "
            f"{world}."
        )
    evicts = keys.when_full in ("evict", "grow") and keys.eviction is not None
    exact = evicts or isinstance(keys, KeysOfShards)
    capacity = _rows_of_shard(table.vocabulary_size, world, exact)
    most = capacity
    if keys.when_full == "grow":
        most = (
            _UNLIMITED
            if keys.max_rows is None
            else _rows_of_shard(keys.max_rows, world, exact)
        )
    candidates = keys.candidates or CANDIDATES_PER_ROW * table.vocabulary_size
    spans = [rule for rule in keys.rules if isinstance(rule, Span)]
    last = keys.rules[-1] if keys.rules else "none"
    policy = "decay" if isinstance(last, DecayingFrequency) else "lru"
    return KeyRules(
        capacity=capacity,
        max_capacity=most,
        candidates=-(-candidates // world),
        threshold=getattr(keys.admission, "threshold", 0),
        probability=getattr(keys.admission, "probability", 1.0),
        seed=initial_key_values.seed_of(table),
        policy=last if isinstance(last, str) else policy,
        ttl=_length(spans, TimeToLive),
        half_life=_length(spans, DecayingFrequency),
        by_time=keys.by_time,
        evicts=evicts,
        floor=0 if keys.floor is None else max(1, int(keys.floor * most)),
        spills=keys.spill is not None,
        fallback_rows=fallback_rows,
        world=world,
    )


def _length(spans: Sequence[Span], kind: type[Span]) -> int:
    """Returns the length of the span of a kind, or 0."""
    return sum(span.length for span in spans if isinstance(span, kind))


def eviction_order(rules: KeyRules, known: LiveKeys, now: int) -> np.ndarray:
    """Returns the indices that sort keys, first to be evicted first, [n] int64.

    `now` is the moment at which they are to be evicted.
    """
    by = [known.keys, known.last_used]
    if rules.policy in ("lfu", "score"):
        by.append(known.frequency)
    elif rules.policy == "decay":
        by.append(_decayed(known.frequency, known.last_used, rules.half_life))
    if rules.ttl:
        alive = ~is_expired(rules, known.last_used, now)
        # Expired keys go by their last use.
        by = [*by[:2], *(np.where(alive, each, 0) for each in by[2:]), alive]
    return np.lexsort(by)


def _decayed(
    frequency: np.ndarray, last_used: np.ndarray, half_life: int
) -> np.ndarray:
    """Orders keys by frequencies that decay: see HalfLife in the kernels."""
    number = np.clip(last_used // half_life, -_MOST_NUMBER, _MOST_NUMBER)
    rest = np.maximum(frequency, 1).astype(np.uint64)
    bits = np.ones_like(rest)
    normal = rest.copy()
    for shift in np.array([32, 16, 8, 4, 2, 1], np.uint64):
        more = rest >> shift > 0
        bits += np.where(more, shift, 0).astype(np.uint64)
        rest = np.where(more, rest >> shift, rest)
    one, drop = np.uint64(1), np.uint64(42)
    fraction = normal << (np.uint64(64) - bits) << one >> drop
    score = (number + bits.astype(np.int64)) * 2**22
    score += fraction.astype(np.int64)
    return np.where(frequency > 0, score, 1 - 2**63)


def is_expired(rules: KeyRules, last_used: np.ndarray, now: int) -> np.ndarray:
    """Returns which keys have expired, [n] bool."""
    if not rules.ttl:
        return np.zeros(np.shape(last_used), bool)
    return last_used < max(now - rules.ttl, -(2**63))


def _rows_of_shard(rows: int, world: int, exact: bool) -> int:
    """Returns for how many keys one of `world` shards has room.

    Keys fall on shards at random. If `exact`, as where keys are evicted or a
    shard's rows are declared, a shard has its share of the rows. Otherwise it
    has more, so that as many keys as the table has rows find room.
    """
    share = -(-rows // world)
    if exact or world == 1:
        return share
    return min(rows, share + math.ceil(_DEVIATIONS * math.sqrt(share)))


def rows_at_first(table: TableSpec, world: int) -> int:
    """Returns the number of rows of a shard's variables at first."""
    rules = key_rules(table, world)
    capacity = rules.capacity
    spare = max(capacity // _SPARE_PART, min(capacity, _MOST_SPARE_OF_SMALL))
    return FIRST_ROW + rules.fallback_rows_here + capacity + spare


def _mix(bits: int) -> int:
    """Applies splitmix64's finaliser to 64 bits."""
    bits = (bits + 0x9E3779B97F4A7C15) & _BITS
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & _BITS
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & _BITS
    return bits ^ (bits >> 31)
