"""A shard's keys in numpy, for where there are no kernels."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.unmirrored import make_variable
from tfrs_embed.storage.key_rules import ABSENT, FIRST_ROW, TRASH, KeyRules

# The operations that take one table; the others take several.
_OF_ONE_TABLE = ("export", "replace", "remove")

# A step that fails between its commit and its publication leaves its commit
# unpublished, until so many others follow.
_MOST_UNPUBLISHED = 16

# What is known of keys is [3, n] int64. Its rows:
_KEY, _FREQUENCY, _LAST_USED = range(3)
_NO_ROWS = np.zeros([0], np.int64)


class NumpyOperations:
    """The operations on tables of keys, as the kernels have them.

    Args:
        tables: the tables.
        calls: a number for each table; see `run`.
    """

    def __init__(self, tables: Sequence[_Table], calls: Sequence[Any]) -> None:
        self._tables = [*tables]
        # The operations that call Python have no resource by which a function
        # could order them. TensorFlow would order those of all tables, and so
        # let one replica wait for another that waits for it. Each reads and
        # writes these instead.
        self._calls = [*calls]

    @classmethod
    def of_table(cls, rules: KeyRules) -> NumpyOperations:
        """Makes a table."""
        calls = make_variable(tf.constant(0, tf.int64), "calls")
        return cls([_Table(rules)], [calls])

    @classmethod
    def together(cls, each: Sequence[NumpyOperations]) -> NumpyOperations:
        """The operations on several tables at once."""
        return cls(
            [table for e in each for table in e._tables],
            [calls for e in each for calls in e._calls],
        )

    def run(self, name: str, *inputs: Any) -> Any:
        """Runs the operation of this name; see `_Table`'s method."""
        # Graphs may stay when nothing else does: see EngineLayer.
        tables = [weakref.ref(table) for table in self._tables]

        def call(before: Any, *values: Any) -> list[np.ndarray]:
            del before  # So that it is no constant, which is computed once.
            alive = [table() for table in tables]
            if None in alive:
                raise RuntimeError("The table of these keys is gone.")
            if name in _OF_ONE_TABLE:
                found = _call(alive[0], name, values)
            else:
                found = _call_each(alive, name, values)
            return [np.asarray(each, np.int64) for each in found]

        before = tf.add_n([calls.read_value() for calls in self._calls])
        shapes = _shapes(name, inputs, len(tables))
        outputs = tf.nest.flatten(  # It may be the only one.
            tf.numpy_function(
                call,
                [before, *inputs],
                [tf.int64] * len(shapes),
                stateful=False,
            )
        )
        with tf.control_dependencies(outputs):
            # Grappler removes a call whose result nobody takes.
            one = outputs[0] if name == "publish" else 1
            for calls in self._calls:
                calls.assign_add(one)
        for output, shape in zip(outputs, shapes, strict=True):
            output.set_shape(shape)
        return outputs if len(outputs) > 1 else outputs[0]


def _shapes(name: str, inputs: Sequence[Any], tables: int) -> list[Any]:
    """The shapes of an operation's results, all int64."""
    changes = [[None], [None], *[[tables]] * 4]
    shapes: dict[str, list[Any]] = {
        "info": [[tables, 12]],
        "find": [None, [tables]],
        "check": [None, []],
        "publish": [[]],
        "plan": [None, *changes],
        "commit": [None, *changes],
        "export": [[None]] * 4,
        "replace": [[]],
        "remove": [None],
    }
    like = inputs[0].shape if inputs and hasattr(inputs[0], "shape") else None
    return [like if shape is None else shape for shape in shapes[name]]


def _call(table: Any, name: str, values: Sequence[Any]) -> Sequence[Any]:
    """Calls a table's method, as the only one."""
    with table.lock:
        found = getattr(table, name)(*values)
    return found if isinstance(found, tuple) else (found,)


def _call_each(
    tables: Sequence[Any], name: str, values: Sequence[Any]
) -> Sequence[Any]:
    """Calls the tables' methods with the part of the values that is theirs."""
    if name == "info":
        return [np.stack([_call(table, name, ())[0] for table in tables])]
    if name == "publish":
        for table, version in zip(tables, np.ravel(values[0]), strict=True):
            _call(table, name, [version])
        return [np.int64(1)]
    entries, table_of, *others = values
    mine: list[Any] = (
        [slice(None)]
        if len(tables) == 1
        else [np.flatnonzero(table_of == i) for i in range(len(tables))]
    )
    found = []
    for i, (table, part) in enumerate(zip(tables, mine, strict=True)):
        if name in ("plan", "commit"):
            # Counts, and a commit's rows, are of the entries; the step is not.
            *each, step = others
            given = [v[part] if len(v) else v for v in each] + [step]
        else:
            given = [np.ravel(v)[i] for v in others]  # The versions of a check.
        found.append(_call(table, name, [entries[part], *given]))
    first = np.zeros(len(entries), np.int64)
    for part, changes in zip(mine, found, strict=True):
        first[part] = changes[0]
    rest = [[changes[k] for changes in found] for k in range(1, len(found[0]))]
    if name == "check":
        return [first, np.sum(rest[0])]
    if name == "find":
        return [first, np.stack(rest[0])]
    new_keys, new_rows, *of_tables = rest
    sizes = [len(each) for each in new_keys]
    return [
        first,
        np.concatenate(new_keys),
        np.concatenate(new_rows),
        sizes,
        *of_tables,
    ]


class _Step(NamedTuple):
    """A step's distinct keys, and what it does to all of them.

    Attributes:
        counted: [n] bool: which of the step's keys count.
        place_of: [number of these]: which of the distinct keys each is.
        known: [3, u], the distinct keys as they are after the step.
        rows: [u], theirs before it, or `ABSENT`.
        hits: the occurrences of those that have rows.
        admitted: [u] bool: which get rows.
        evicted: how many other keys go.
        capacity: the capacity after the step.
        lacking: how many rows too few there are.
    """

    counted: np.ndarray
    place_of: np.ndarray
    known: np.ndarray
    rows: np.ndarray
    hits: int
    admitted: np.ndarray
    evicted: int
    capacity: int
    lacking: int

    def of_entries(self, rows: np.ndarray, none: int) -> np.ndarray:
        """Rows of the step's keys, [n], of those of the distinct ones."""
        result = np.full(len(self.counted), none)
        result[self.counted] = np.where(rows == ABSENT, none, rows)[
            self.place_of
        ]
        return result

    def changes(self, new_rows: np.ndarray) -> tuple[Any, ...]:
        """The keys that get these rows, the rows, and how many are lacking."""
        new_keys = self.known[_KEY, self.admitted][: len(new_rows)]
        return new_keys, new_rows, self.lacking


class _Table:
    """The keys. Whoever calls a method without an underscore has the lock."""

    def __init__(self, rules: KeyRules) -> None:
        self._rules = rules
        self.lock = threading.Lock()
        self._capacity = rules.capacity
        self._physical = FIRST_ROW + rules.capacity
        self._shown = ABSENT  # The last row that a plan has shown.
        self._live, self._candidates = _Keys(self._physical), _Keys(1)
        self._statistics = np.zeros([8], np.int64)
        # See key_table.h, as for what follows.
        self._version = 0
        self._written = np.zeros([self._physical], np.int64)
        self._unpublished: list[int] = []

    def info(self) -> np.ndarray:
        """[12]: size, capacity, physical rows, statistics, unpublished."""
        sizes = [len(self._live), self._capacity, self._physical]
        last = [len(self._unpublished)]
        return np.concatenate([sizes, self._statistics, last])

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, int]:
        return self._hide(self._live.find(keys)), self._version

    def check(
        self, rows: np.ndarray, version: np.ndarray
    ) -> tuple[np.ndarray, np.int64]:
        changed = self._written[rows] > version
        return np.where(changed, ABSENT, rows), np.sum(changed)

    def publish(self, version: np.ndarray) -> int:
        if version in self._unpublished:
            self._unpublished.remove(int(version))
        return 1

    def plan(
        self, keys: np.ndarray, counts: np.ndarray, number: np.ndarray
    ) -> tuple[Any, ...]:
        step = self._decide(keys, counts, number)
        new, rows = _NO_ROWS, step.rows.copy()
        if not step.lacking:
            self._raise(FIRST_ROW + step.capacity)
            new = rows[step.admitted] = self._show(int(np.sum(step.admitted)))
        found = self._hide(step.of_entries(rows, ABSENT))
        if len(new):
            self._stamp(new)
        return found, *step.changes(new), self._physical, self._version

    def commit(
        self,
        keys: np.ndarray,
        counts: np.ndarray,
        hints: np.ndarray,
        number: np.ndarray,
    ) -> tuple[Any, ...]:
        del hints  # Keys are searched for without them.
        step = self._decide(keys, counts, number)
        new, rows, version = _NO_ROWS, step.rows.copy(), 0
        if not step.lacking:
            self._capacity = step.capacity
            self._raise(FIRST_ROW + self._capacity)
            if step.evicted:
                self._evict(step)
            new = self._live.free(FIRST_ROW)[: np.sum(step.admitted)]
            rows[step.admitted] = new
            if len(new):
                version = self._stamp(new)
                self._unpublished.append(version)
                del self._unpublished[:-_MOST_UNPUBLISHED]
            left = rows == ABSENT
            self._live.put(rows[~left], step.known[:, ~left])
            if self._rules.threshold:
                self._candidates.forget(step.known[_KEY, step.admitted])
                self._remember(step.known[:, left])
            last = len(new), step.evicted, int(np.sum(left)), step.hits
            self._statistics[:4] = last
            self._statistics[4:] += last
        found = step.of_entries(rows, TRASH)
        return found, *step.changes(new), self._physical, version

    def export(self, candidates: bool) -> tuple[np.ndarray, ...]:
        store = self._candidates if candidates else self._live
        places = np.flatnonzero(store.live)
        keys, frequency, last_used = store.known[:, places]
        return keys, places, frequency, last_used

    def replace(self, *known: np.ndarray) -> int:
        live, candidates = np.stack(known[:3]), np.stack(known[3:])
        size = live.shape[1]
        self._capacity = self._grown(size)
        self._raise(FIRST_ROW + self._capacity)
        self._live, self._candidates = _Keys(self._physical), _Keys(1)
        self._live.put(FIRST_ROW + np.arange(size), live)
        if self._rules.threshold:
            new = self._live.find(candidates[_KEY]) == ABSENT
            self._remember(candidates[:, new])
        self._unpublished = [self._stamp(np.arange(self._physical))]
        return self._version

    def remove(self, keys: np.ndarray, evicted: bool) -> np.ndarray:
        rows, size = self._live.find(keys), len(self._live)
        self._live.forget(keys)
        self._statistics[5] += evicted * (size - len(self._live))
        self._candidates.forget(keys)
        return rows

    def _decide(
        self, keys: np.ndarray, counts: np.ndarray, number: np.ndarray
    ) -> _Step:
        """Decides what a step does; changes nothing."""
        rules, size = self._rules, len(self._live)
        if not len(counts):
            counts = np.ones_like(keys)
        counted = counts > 0
        distinct, index = np.unique(keys[counted], return_inverse=True)
        occurrences = np.zeros_like(distinct)
        np.add.at(occurrences, index, counts[counted])
        rows = self._live.find(distinct)
        here = rows != ABSENT
        hits = int(np.sum(occurrences[here]))
        # Those of no key are zeros.
        places = self._candidates.find(distinct)
        occurrences += np.where(
            here,
            self._live.known[_FREQUENCY, rows],
            self._candidates.known[_FREQUENCY, places],
        )
        admitted = ~here & self._admits(distinct, occurrences, number)
        needed = size + int(np.sum(admitted))
        # Expired keys go before the capacity grows, others after.
        expired = 0
        if rules.ttl and needed > self._capacity:
            last_used = self._live.known[_LAST_USED, self._unused(rows)]
            expired = int(np.sum(last_used < number - rules.ttl))
            expired = min(expired, needed - self._capacity)
        capacity = self._grown(needed - expired)
        lacking, others = max(0, needed - expired - capacity), 0
        if rules.evicts and rules.policy != "none":
            others = min(lacking, size - int(np.sum(here)) - expired)
        return _Step(
            counted,
            index,
            np.stack([distinct, occurrences, np.full_like(distinct, number)]),
            rows,
            hits,
            admitted,
            expired + others,
            capacity,
            lacking - others,
        )

    def _admits(
        self, keys: np.ndarray, occurrences: np.ndarray, number: np.ndarray
    ) -> np.ndarray:
        """Which of unknown keys get a row, [n] bool."""
        rules = self._rules
        if rules.threshold:
            return occurrences >= rules.threshold
        if rules.probability == 1:
            return np.ones(len(keys), bool)
        seed = np.array([rules.seed % 2**64], np.uint64)
        bits = _mix(seed ^ _mix(keys.view(np.uint64)))
        bits = _mix(bits + number.reshape([1]).view(np.uint64))
        uniform = (bits >> np.uint64(11)) * 2.0**-53
        return uniform < 1 - (1 - rules.probability) ** occurrences

    def _grown(self, keys: int) -> int:
        """The capacity for so many keys, or the greatest."""
        capacity = self._capacity
        while capacity < keys and capacity < self._rules.max_capacity:
            capacity = min(2 * capacity, self._rules.max_capacity)
        return capacity

    def _unused(self, rows: np.ndarray) -> np.ndarray:
        """The rows of keys, but for some rows."""
        left = self._live.live.copy()
        left[rows] = False
        return np.flatnonzero(left)

    def _evict(self, step: _Step) -> None:
        by_frequency = self._rules.policy == "lfu"
        rows = self._unused(step.rows)
        self._live.erase(
            self._live.first_to_go(rows, step.evicted, by_frequency)
        )

    def _raise(self, physical: int) -> None:
        """Has so many rows at least."""
        more = physical - self._physical
        if more > 0:
            self._physical = physical
            self._live.reserve(physical)
            self._written = np.pad(self._written, (0, more))

    def _show(self, count: int) -> np.ndarray:
        """Rows that stay free, not the last time's if there are enough."""
        if not count:
            return _NO_ROWS
        self._raise(FIRST_ROW + len(self._live) + count)
        free = self._live.free(FIRST_ROW)
        start = np.searchsorted(free, self._shown, "right")
        shown = np.take(free, start + np.arange(count), mode="wrap")
        self._shown = shown[-1]
        return shown

    def _hide(self, rows: np.ndarray) -> np.ndarray:
        hidden = np.isin(self._written[rows], self._unpublished)
        return np.where(hidden, ABSENT, rows)

    def _stamp(self, rows: np.ndarray) -> int:
        self._version += 1
        self._written[rows] = self._version
        return self._version

    def _remember(self, known: np.ndarray) -> None:
        """Has candidates; forgets those seen longest ago, if too many."""
        store = self._candidates
        places = store.find(known[_KEY])
        new = places == 0
        store.reserve(1 + len(store) + int(np.sum(new)))
        places[new] = store.free(1)[: np.sum(new)]
        store.put(places, known)
        excess = len(store) - self._rules.candidates
        if excess > 0:
            store.erase(store.first_to_go(np.flatnonzero(store.live), excess))


class _Keys:
    """Keys at places, the first of which is never used.

    Attributes:
        live: [places] bool: which have a key.
        known: [3, places], what is known of the keys.
    """

    def __init__(self, places: int) -> None:
        self._place_of: dict[int, int] = {}
        self.live = np.zeros([places], bool)
        self.known = np.zeros([3, places], np.int64)

    def __len__(self) -> int:
        return len(self._place_of)

    def reserve(self, places: int) -> None:
        """Makes so many places at least."""
        more = max(0, places - len(self.live))
        self.live = np.pad(self.live, (0, more))
        self.known = np.pad(self.known, ((0, 0), (0, more)))

    def free(self, first: int) -> np.ndarray:
        """The places without a key, from `first` on."""
        return first + np.flatnonzero(~self.live[first:])

    def find(self, keys: np.ndarray) -> np.ndarray:
        """The places of keys; 0 for those without."""
        found = map(self._place_of.get, keys.tolist(), itertools.repeat(0))
        return np.fromiter(found, np.int64, len(keys))

    def put(self, places: np.ndarray, known: np.ndarray) -> None:
        """Gives places to keys, or sets what is known of those there."""
        at = zip(known[_KEY].tolist(), places.tolist(), strict=True)
        self._place_of.update(at)
        self.live[places] = True
        self.known[:, places] = known

    def erase(self, places: np.ndarray) -> None:
        for key in self.known[_KEY, places].tolist():
            del self._place_of[key]
        self.live[places] = False

    def forget(self, keys: np.ndarray) -> None:
        """Erases those of the keys that are there."""
        places = np.unique(self.find(keys))
        self.erase(places[places != 0])

    def first_to_go(
        self, places: np.ndarray, count: int, by_frequency: bool = False
    ) -> np.ndarray:
        """Up to so many of the places, the first in the order of eviction."""
        score = self.known[_FREQUENCY if by_frequency else _LAST_USED, places]
        if count < len(places):  # To sort few.
            last = np.partition(score, count - 1)[count - 1]
            places = places[score <= last]
        by = [_KEY, _LAST_USED, _FREQUENCY][: 2 + by_frequency]
        order = np.lexsort([self.known[each, places] for each in by])
        return places[order[:count]]


def _mix(bits: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, of [n] uint64."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
