"""The reference of tables whose keys come and go: which keys have rows.

It is written key by key with dicts and sorting, with no thought of speed and
nothing taken from the library, so that it can be read as the definition.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

MASK = 2**64 - 1


def mix(z):
    """splitmix64's finaliser."""
    z = (z + 0x9E3779B97F4A7C15) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def shard_of(key, world):
    """The shard that a key is on."""
    mixed = (key & MASK) ^ (key & MASK) >> 30
    mixed = mixed * 0xBF58476D1CE4E5B9 & MASK
    mixed ^= mixed >> 31
    return (mixed - 2**64 if mixed >= 2**63 else mixed) % world


def keys_on(shard, world, count):
    """The least keys from 0 on that are on a shard."""
    keys = (key for key in itertools.count() if shard_of(key, world) == shard)
    return list(itertools.islice(keys, count))


def uniform(seed, key, step):
    """The number in [0, 1) that a key has in a step."""
    of_key = mix((seed & MASK) ^ mix(key & MASK))
    return (mix((of_key + step) & MASK) >> 11) * 2.0**-53


@dataclasses.dataclass
class Seen:
    """What is known of a key."""

    frequency: float  # Or its score, if the program gives scores.
    last: int  # The step, or the time, of its last use.


@dataclasses.dataclass
class Outcome:
    """What a step does, or would do.

    Attributes:
        lacking: the rows that are too few; if it isn't 0, nothing happens.
        known: the keys of the step that had rows before.
        admitted: those that get one.
        evicted: those that lose theirs.
    """

    lacking: int
    known: set
    admitted: set
    evicted: set


class ReferenceKeys:
    """The keys that have the rows of a shard.

    Args:
        rules: an object with the fields of `KeyRules`.
    """

    def __init__(self, rules):
        self.rules = rules
        self.capacity = rules.capacity
        self.live: dict[int, Seen] = {}
        self.candidates: dict[int, Seen] = {}
        self.newest = -(2**63)  # The time of a step, in microseconds.
        self.last = [0, 0, 0, 0]
        self.total = [0, 0, 0, 0]

    def statistics(self):
        """Admitted, evicted, rejected, hits: of the last step, then of all."""
        return [*self.last, *self.total]

    def plan(self, keys, counts, step, time=0):
        """Says what `commit` would do."""
        now = self.moment(step, time)
        return self._decide(_sum(keys, counts), step, now)[0]

    def moment(self, step, time):
        """A step, or its time, which a clock that goes back doesn't change."""
        return max(time, self.newest) if self.rules.by_time else step

    def commit(self, keys, counts, step, time=0):
        """Counts a step's keys, evicts and admits; returns what it did."""
        used, now = _sum(keys, counts), self.moment(step, time)
        outcome, capacity = self._decide(used, step, now)
        if outcome.lacking:
            return outcome
        self.newest = now
        self.capacity = capacity
        for key in outcome.evicted:
            del self.live[key]
        for key, occurrences in used.items():
            if key in outcome.known:
                seen = self.live[key]
                if not self._is_scored:
                    seen.frequency = self._decayed(seen, now) + occurrences
                seen.last = now
            elif key in outcome.admitted:
                before = self.candidates.pop(key, Seen(0, 0))
                total = before.frequency + occurrences
                self.live[key] = Seen(0 if self._is_scored else total, now)
            elif self.rules.threshold:
                seen = self.candidates.setdefault(key, Seen(0, 0))
                seen.frequency += occurrences
                seen.last = now
        self._forget_candidates()
        self.last = [
            len(outcome.admitted),
            len(outcome.evicted),
            len(used) - len(outcome.known) - len(outcome.admitted),
            sum(used[key] for key in outcome.known),
        ]
        self.total = [a + b for a, b in zip(self.total, self.last, strict=True)]
        return outcome

    def remove(self, keys, evicted=False):
        """Forgets keys; returns those that had rows."""
        gone = {key for key in keys if key in self.live}
        for key in gone:
            del self.live[key]
        for key in keys:
            self.candidates.pop(key, None)
        self.total[1] += len(gone) if evicted else 0
        return gone

    def score(self, keys, scores):
        """Gives keys with rows their scores; others get none."""
        for key, score in zip(keys, scores, strict=True):
            if key in self.live:
                self.live[key].frequency = score

    def replace(self, live, candidates):
        """Forgets all keys; both are dicts of `Seen`."""
        self.live = dict(live)
        while self.capacity < len(live):
            self.capacity = min(2 * self.capacity, self.rules.max_capacity)
        self.candidates = {}
        if self.rules.threshold:
            self.candidates = {
                key: seen for key, seen in candidates.items() if key not in live
            }
        self.newest = max(
            [-(2**63)]
            + [seen.last for seen in [*live.values(), *candidates.values()]]
        )
        self._forget_candidates()

    @property
    def _is_scored(self):
        return self.rules.policy == "score"

    def _forget_candidates(self):
        by_age = sorted(self.candidates, key=self._age_of_candidate)
        for key in by_age[: max(0, len(by_age) - self.rules.candidates)]:
            del self.candidates[key]

    def _age_of_candidate(self, key):
        return self.candidates[key].last, key

    def _is_admitted(self, key, occurrences, step):
        rules = self.rules
        if rules.threshold:
            before = self.candidates.get(key, Seen(0, 0)).frequency
            return before + occurrences >= rules.threshold
        if rules.probability < 1:
            chance = 1 - (1 - rules.probability) ** occurrences
            return uniform(rules.seed, key, step) < chance
        return True

    def _decide(self, used, step, now):
        """The outcome of a step, and the capacity after it."""
        rules = self.rules
        known = {key for key in used if key in self.live}
        admitted = {
            key
            for key, occurrences in used.items()
            if key not in known and self._is_admitted(key, occurrences, step)
        }
        capacity = self.capacity
        evicted: set[int] = set()

        def need(most):
            return len(self.live) - len(evicted) + len(admitted) - most

        def evict_some(keys, score, most):
            evicted.update(sorted(keys, key=score)[: max(0, need(most))])

        if need(capacity) > 0:
            # Where no more rows can come, keys go down to the floor together.
            floor = rules.floor or rules.max_capacity
            full = capacity == rules.max_capacity
            unused = set(self.live) - known
            expired = {k for k in unused if self._is_expired(k, now)}
            evict_some(expired, self._age, floor if full else capacity)
            while need(capacity) > 0 and capacity < rules.max_capacity:
                capacity = min(2 * capacity, rules.max_capacity)
            evicts = rules.evicts and rules.policy != "none"
            if evicts and (full or need(capacity) > 0):
                evict_some(unused - evicted, self._score, floor)
        return Outcome(
            max(0, need(capacity)), known, admitted, evicted
        ), capacity

    def order(self, now):
        """All keys with rows, in the order in which they would be evicted."""
        expired = {k for k in self.live if self._is_expired(k, now)}
        others = set(self.live) - expired
        return [
            *sorted(expired, key=self._age),
            *sorted(others, key=self._score),
        ]

    def expired(self, now):
        """The number of keys that have expired."""
        return sum(self._is_expired(key, now) for key in self.live)

    def _is_expired(self, key, now):
        ttl = self.rules.ttl
        return ttl > 0 and now - self.live[key].last > ttl

    def _decayed(self, seen, now):
        """A frequency after the half-lives that have ended since its use."""
        length = self.rules.half_life
        if length == 0:
            return seen.frequency
        return seen.frequency >> max(0, now // length - seen.last // length)

    def _age(self, key):
        return self.live[key].last, key

    def _score(self, key):
        seen = self.live[key]
        if self.rules.policy in ("lfu", "score"):
            return seen.frequency, seen.last, key
        if self.rules.policy == "decay":
            # Frequencies now are in the order of frequency * 2^number, of which
            # the exponent and 23 bits are compared.
            if seen.frequency == 0:
                return -math.inf, 0, seen.last, key
            number = seen.last // self.rules.half_life
            size = seen.frequency.bit_length()
            bits = (seen.frequency << 23) >> size
            return number + size, bits, seen.last, key
        return self._age(key)


def _sum(keys, counts):
    """The occurrences of each key that occurs."""
    used: dict[int, int] = {}
    for key, count in zip(keys, counts or [1] * len(keys), strict=True):
        if count > 0:
            used[key] = used.get(key, 0) + count
    return used
