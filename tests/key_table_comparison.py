"""Tables of keys beside the reference, which must agree in all."""

import numpy as np
import tensorflow as tf

from dynamic_reference import ReferenceKeys, Seen
from tfrs_embed.storage.key_rules import (
    ABSENT,
    FIRST_ROW,
    TRASH,
    KeyRules,
    LiveKeys,
)
from tfrs_embed.storage.key_table import KeyTable

INT64 = np.iinfo(np.int64)
EXTREME = [0, -1, INT64.min, INT64.max, INT64.min + 1, 1 << 32]

POLICIES = [
    {"policy": "none"},
    {"policy": "lru", "evicts": True},
    {"policy": "lfu", "evicts": True},
    {"policy": "score", "evicts": True},
    {"policy": "lru", "ttl": 3, "evicts": True},
    {"policy": "lru", "ttl": 2},
    {"policy": "lfu", "ttl": 3, "evicts": True},
    {"policy": "score", "ttl": 3, "evicts": True},
    {"policy": "lru", "ttl": 3, "by_time": True, "evicts": True},
    {"policy": "decay", "half_life": 3, "evicts": True},
    {
        "policy": "decay",
        "ttl": 4,
        "half_life": 2,
        "by_time": True,
        "evicts": True,
    },
]
ADMISSIONS = [
    {},
    {"threshold": 1},
    {"threshold": 3},
    {"probability": 0.3, "seed": 2**63 + 5},
]


def int64(values):
    return tf.constant(np.array(values, np.int64))


def live_keys(table):
    """The keys with rows, as arrays in any order."""
    return LiveKeys(*(values.numpy() for values in table.export()))


def candidates_of(table):
    """The keys without rows, [c, 3]: each with its occurrences, last step."""
    keys, _, *seen = table.export(candidates=True)
    return np.stack([keys, *seen], 1)


class Compared:
    """A table and the reference, which are given the same and must agree.

    A step is its number, or its number and its time.
    """

    def __init__(self, rules):
        self.rules = rules
        self.table = KeyTable(rules)
        self.reference = ReferenceKeys(rules)
        self.rows = {}  # Of the live keys.
        self.most_planned = 0
        self.hints = {}

    def find(self, keys):
        found = self.table.lookup(int64(keys)).rows.numpy().tolist()
        assert found == [self.rows.get(key, ABSENT) for key in keys]

    def plan(self, keys, counts, step):
        expected = self.reference.plan(keys, counts, *np.ravel(step).tolist())
        before = self.table.numbers().physical
        plan = self.table.reserve(
            int64(keys), counts if counts is None else int64(counts), step
        )
        assert plan.lacking.numpy().item() == expected.lacking
        assert (
            plan.physical.numpy().item()
            == self.table.numbers().physical
            >= before
        )
        if expected.lacking:
            assert plan.physical.numpy().item() == before
            return []
        planned = self._new_rows(plan)
        assert set(planned) == expected.admitted
        assert not set(planned.values()) & set(self.rows.values())
        self.most_planned = max(self.most_planned, len(planned))
        rows = {**self.rows, **planned}
        assert plan.rows.numpy().tolist() == [
            rows.get(key, ABSENT) if count > 0 else ABSENT
            for key, count in _counted(keys, counts)
        ]
        self.hints = rows
        return list(planned.values())

    def commit(self, keys, counts, step, hints=None):
        if hints is None:
            hints = [self.hints.get(key, ABSENT) for key in keys]
        expected = self.reference.commit(keys, counts, *np.ravel(step).tolist())
        before = set(self.table.export().keys.numpy().tolist())
        commit = self.table.commit(
            int64(keys),
            counts if counts is None else int64(counts),
            int64(hints),
            step,
        )
        assert commit.lacking.numpy().item() == expected.lacking
        if expected.lacking:
            return expected
        after = set(self.table.export().keys.numpy().tolist())
        assert before - after == expected.evicted
        new = self._new_rows(commit)
        assert set(new) == expected.admitted
        for key in expected.evicted:
            del self.rows[key]
        # New keys are found when their rows are written.
        assert not any(self.table.lookup(commit.new_keys).rows.numpy())
        self.table.publish(commit.versions)
        self.rows.update(new)
        assert commit.rows.numpy().tolist() == [
            self.rows.get(key, TRASH) if count > 0 else TRASH
            for key, count in _counted(keys, counts)
        ]
        assert commit.physical.numpy().item() == self.table.numbers().physical
        return expected

    def remove(self, keys, evicted=False):
        gone = self.reference.remove(keys, evicted)
        rows = self.table.remove(np.array(keys, np.int64), evicted)
        assert rows.tolist() == [
            self.rows[key] if key in gone else ABSENT for key in keys
        ]
        for key in gone:
            del self.rows[key]

    def score(self, keys, scores):
        """Scores keys of a table whose policy it is."""
        if self.rules.policy == "score":
            self.reference.score(keys, scores)
            rows = self.table.score(np.array(keys, np.int64), scores)
            assert rows.tolist() == [self.rows.get(k, ABSENT) for k in keys]

    def replace(self, live, candidates):
        """Both are dicts of (frequency, step)."""
        self.reference.replace(
            {key: Seen(*seen) for key, seen in live.items()},
            {key: Seen(*seen) for key, seen in candidates.items()},
        )
        version = self.table.replace(*_array(live).T, _array(candidates))
        assert not any(self.table.lookup(int64(list(live))).rows.numpy())
        self.table.publish(version)
        self.rows = {key: FIRST_ROW + i for i, key in enumerate(live)}

    def check(self):
        """All that can be observed."""
        table, reference = self.table, self.reference
        live, numbers = live_keys(table), table.numbers()
        assert len(live.keys) == len(reference.live) == numbers.size
        assert _as_dict(live.keys, live.frequency, live.last_used) == {
            key: (seen.frequency, seen.last)
            for key, seen in reference.live.items()
        }
        # Rows stay the keys' own.
        assert _as_dict(live.keys, live.rows) == {
            key: (row,) for key, row in self.rows.items()
        }
        candidates = candidates_of(table)
        assert len(candidates) == len(reference.candidates)
        assert _as_dict(*candidates.T) == {
            key: (seen.frequency, seen.last)
            for key, seen in reference.candidates.items()
        }
        assert [*numbers.last, *numbers.total] == reference.statistics()
        assert numbers.capacity == reference.capacity
        physical = numbers.physical
        most = FIRST_ROW + self.rules.max_capacity + self.most_planned
        assert FIRST_ROW + reference.capacity <= physical <= most
        rows = set(self.rows.values())
        assert len(rows) == len(self.rows)
        assert all(FIRST_ROW <= row < physical for row in rows)

    def _new_rows(self, result):
        """The new keys of a plan or commit, each in a row of its own."""
        keys, rows = result.new_keys.numpy(), result.new_rows.numpy()
        assert len(set(rows.tolist())) == len(set(keys.tolist())) == len(rows)
        assert all(rows >= FIRST_ROW) and all(
            rows < result.physical.numpy().item()
        )
        return dict(zip(keys.tolist(), rows.tolist(), strict=True))


def _counted(keys, counts):
    return zip(keys, counts or [1] * len(keys), strict=True)


def _as_dict(keys, *values):
    columns = zip(*(value.tolist() for value in values), strict=True)
    return dict(zip(keys.tolist(), columns, strict=True))


def _array(seen):
    """Keys with what is known of them, [n, 3]."""
    rows = [(key, *value) for key, value in seen.items()]
    return np.array(rows, np.int64).reshape([-1, 3])


def run_random_stream(rng, capacity, steps):
    """Steps of random rules and sizes, some of which have no room."""
    most = int(capacity * rng.choice([1, 2, 3.5]))
    floor = int(rng.integers(0, most + 1)) if rng.random() < 0.5 else 0
    compared = Compared(
        KeyRules(
            capacity=capacity,
            max_capacity=most,
            candidates=int(rng.integers(1, 2 * capacity + 1)),
            floor=floor,
            **ADMISSIONS[rng.integers(len(ADMISSIONS))],
            **POLICIES[rng.integers(len(POLICIES))],
        )
    )
    size = int(rng.integers(1, 2 * capacity + 1))
    number = time = 0
    for _ in range(steps):
        number += int(rng.choice([1, 1, 1, 1, 0, 9, -3]))
        time += int(rng.choice([1, 1, 2, 0, 7, -9]))
        step = [number, time]
        keys = rng.zipf(1.2, size) % (4 * capacity) + capacity * number // 8
        extreme = rng.random(size) < 0.02
        keys[extreme] = rng.choice(EXTREME, np.sum(extreme))
        keys = keys.tolist()
        counts = (
            rng.integers(0, 4, size).tolist() if rng.random() < 0.5 else None
        )
        if rng.random() < 0.8:
            compared.plan(keys, counts, step)
        if rng.random() < 0.9:
            compared.commit(keys, counts, step)
        if rng.random() < 0.1:
            compared.remove(keys[: size // 3], bool(rng.random() < 0.5))
        if rng.random() < 0.05:
            seen = {
                int(key): tuple(rng.integers(1, 9, 2).tolist())
                for key in rng.integers(0, 4 * capacity, 2 * capacity)
            }
            live = dict(list(seen.items())[: min(most, len(seen) // 2)])
            compared.replace(live, seen)
        if rng.random() < 0.3:
            compared.score(keys, rng.integers(-2, 3, size).tolist())
        compared.find(keys)
    compared.check()
