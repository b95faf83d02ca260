"""The keys of a shard in numpy, for machines without kernels.

`kernels/cc/key_table.h` explains the operations.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.unmirrored import make_variable
from tfrs_embed.storage.key_rules import ABSENT, FIRST_ROW, TRASH, KeyRules

# The operations that take one table; the others take several.
_OF_ONE_TABLE = ("export", "replace", "remove", "take_removed")
# The ranks of operations' results, all int64; and the operations whose first
# result has the shape of their first input.
_RANKS = {
    "info": [2],
    "find": [1, 1],
    "check": [1, 0],
    "publish": [0],
    "reserve": [1] * 7,
    "commit": [1] * 7,
    "export": [1] * 4,
    "replace": [0],
    "remove": [1],
    "take_removed": [1, 1],
}
_LIKE_INPUT = ("find", "check", "reserve", "commit", "remove")

# The commit of a step that fails before its publication stays unpublished,
# until so many others follow.
_MOST_UNPUBLISHED = 16

# The rows of arrays of keys, which are sorted by key.
_KEY, _FREQUENCY, _LAST_USED, _ROW = range(4)


class NumpyKeys:
    """The operations on tables of keys, named as those of the kernels.

    `calls` has a variable for each table, which orders the operations.
    """

    def __init__(self, tables: Sequence[_Table], calls: Sequence[Any]) -> None:
        self._tables = [*tables]
        # Functions can't order calls of Python by a resource. TensorFlow would
        # order the calls of all tables, so that one replica would wait for
        # another that waits for it. Each call reads and writes these instead.
        self._calls = [*calls]

    @classmethod
    def of_table(cls, rules: KeyRules) -> NumpyKeys:
        """Makes a table."""
        calls = make_variable(tf.constant(0, tf.int64), "calls")
        return cls([_Table(rules)], [calls])

    @classmethod
    def joined(cls, each: Sequence[NumpyKeys]) -> NumpyKeys:
        """Returns the operations on several tables."""
        return cls(
            [table for e in each for table in e._tables],
            [calls for e in each for calls in e._calls],
        )

    def run(self, name: str, *inputs: Any) -> Any:
        """Runs the operation with this name, a method of `_Table`."""
        # Graphs may outlive everything else: see EngineLayer.
        tables = [weakref.ref(table) for table in self._tables]

        def call(before: Any, *values: Any) -> list[np.ndarray]:
            del before  # An input, so that the call is no constant.
            alive = [table() for table in tables]
            if None in alive:
                raise RuntimeError("The table of these keys is gone.")
            if name in _OF_ONE_TABLE:
                found = _call(alive[0], name, values)
            else:
                found = _call_each(alive, name, values)
            return [np.asarray(each, np.int64) for each in found]

        before = tf.add_n([calls.read_value() for calls in self._calls])
        outputs = tf.nest.flatten(  # There may be one only.
            tf.numpy_function(
                call,
                [before, *inputs],
                [tf.int64] * len(_RANKS[name]),
                stateful=False,
            )
        )
        with tf.control_dependencies(outputs):
            # Grappler removes a call whose result is not used.
            one = outputs[0] if name == "publish" else 1
            for calls in self._calls:
                calls.assign_add(one)
        for output, rank in zip(outputs, _RANKS[name], strict=True):
            output.set_shape([None] * rank)
        if name in _LIKE_INPUT:
            outputs[0].set_shape(inputs[0].shape)
        return outputs if len(outputs) > 1 else outputs[0]


def _call(table: Any, name: str, values: Sequence[Any]) -> Sequence[Any]:
    """Calls a table's method under the table's lock."""
    with table.lock:
        found = getattr(table, name)(*values)
    return found if isinstance(found, tuple) else (found,)


def _call_each(
    tables: Sequence[Any], name: str, values: Sequence[Any]
) -> Sequence[Any]:
    """Calls the tables' methods, each with its part; joins the results."""
    if name == "info":
        return [np.stack([_call(table, name, ())[0] for table in tables])]
    if name == "publish":
        for table, version in zip(tables, np.ravel(values[0]), strict=True):
            _call(table, name, [version])
        return [np.int64(1)]
    entries, table_of, *others = values
    first, rest = np.zeros(len(entries), np.int64), []
    for i, table in enumerate(tables):
        mine = table_of == i if len(tables) > 1 else slice(None)
        if name in ("reserve", "commit"):
            # Counts and reserved rows are for entries, the step is for all.
            *each, step = others
            given = [v[mine] if len(v) else v for v in each] + [step]
        else:
            given = [np.ravel(v)[i] for v in others]  # Versions, for "check".
        first[mine], *more = _call(table, name, [entries[mine], *given])
        rest.append(more)
    joined = list(zip(*rest, strict=True))
    if name == "check":
        return [first, np.sum(joined[0])]
    if name == "find":
        return [first, np.stack(joined[0])]
    new_keys, new_rows, *of_tables = joined
    sizes = [len(each) for each in new_keys]
    new = [np.concatenate(new_keys), np.concatenate(new_rows)]
    return [first, *new, sizes, *of_tables]


class _Step(NamedTuple):
    """A step's distinct keys, and how the step changes the table.

    Attributes:
        counted: [n] bool, which of the step's entries count.
        places: the distinct key of each of these entries.
        known: [4, u], the distinct keys after the step; new keys lack rows.
        hits: the occurrences of keys with rows.
        admitted: [u] bool, which keys get rows.
        evicted: how many other keys are evicted.
        capacity: the capacity after the step.
        lacking: how many rows are lacking.
    """

    counted: np.ndarray
    places: np.ndarray
    known: np.ndarray
    hits: int
    admitted: np.ndarray
    evicted: int
    capacity: int
    lacking: int

    def rows(self, none: int) -> np.ndarray:
        """Returns the rows of the step's entries, [n]; `none` for no row."""
        rows = np.full(len(self.counted), none)
        found = self.known[_ROW, self.places]
        rows[self.counted] = np.where(found == ABSENT, none, found)
        return rows

    def give(self, new_rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gives rows to admitted keys; returns both. None if some lack."""
        admitted = np.flatnonzero(self.admitted)[: len(new_rows)]
        self.known[_ROW, admitted] = new_rows
        return self.known[_KEY, admitted], new_rows


class _Table:
    """The keys. Callers of a public method must hold the lock."""

    def __init__(self, rules: KeyRules) -> None:
        self._rules = rules
        self.lock = threading.Lock()
        self._capacity = rules.capacity
        self._last_spare = ABSENT  # The last row that `reserve` returned.
        # Keys that lost their rows since the last `take_removed`; None: there
        # was none. And whether they were too many to be noted.
        self._removed: np.ndarray | None = None
        self._missed = False
        # Keys with rows, and candidates, whose row is `ABSENT`.
        self._known = np.zeros([4, 0], np.int64)
        self._statistics = np.zeros([8], np.int64)
        # The version in which each row was last written.
        self._written = np.zeros([FIRST_ROW + rules.capacity], np.int64)
        self._version = 0
        self._unpublished: list[int] = []

    def info(self) -> np.ndarray:
        """Returns the numbers of `KeyTable.info`; there is no spill."""
        sizes = [self._size(), self._capacity, len(self._written)]
        last = [len(self._unpublished), 0, 0, 0, 0]
        return np.concatenate([sizes, self._statistics, last])

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, int]:
        rows = _values(self._known, _ROW, keys)
        return self._published(rows), self._version

    def check(
        self, rows: np.ndarray, version: np.ndarray
    ) -> tuple[np.ndarray, np.int64]:
        changed = self._written[rows] > version
        return np.where(changed, ABSENT, rows), np.sum(changed)

    def publish(self, version: np.ndarray) -> int:
        if version in self._unpublished:
            self._unpublished.remove(int(version))
        return 1

    def reserve(
        self, keys: np.ndarray, counts: np.ndarray, number: np.ndarray
    ) -> tuple[Any, ...]:
        step = self._decide(keys, counts, number)
        new = np.zeros([0], np.int64)
        if not step.lacking:
            self._add_rows(FIRST_ROW + step.capacity)
            new = self._spare_rows(int(np.sum(step.admitted)))
        given = step.give(new)
        found = self._published(step.rows(ABSENT))
        if len(new):
            self._mark(new)
        return found, *given, step.lacking, len(self._written), self._version

    def commit(
        self,
        keys: np.ndarray,
        counts: np.ndarray,
        hints: np.ndarray,
        number: np.ndarray,
    ) -> tuple[Any, ...]:
        del hints  # Keys are found without them.
        step = self._decide(keys, counts, number)
        new, version = np.zeros([0], np.int64), 0
        if not step.lacking:
            self._capacity = step.capacity
            self._add_rows(FIRST_ROW + self._capacity)
            if step.evicted:
                self._evict(step)
            new = self._free_rows()[: np.sum(step.admitted)]
        given = step.give(new)
        if len(new):
            version = self._mark(new)
            self._unpublished.append(version)
            del self._unpublished[:-_MOST_UNPUBLISHED]
        if not step.lacking:
            absent = step.known[_ROW] == ABSENT
            kept = ~absent | bool(self._rules.threshold)
            self._known = _merged(self._known, step.known[:, kept])
            self._forget()
            last = len(new), step.evicted, int(np.sum(absent)), step.hits
            self._statistics[:4] = last
            self._statistics[4:] += last
        found = step.rows(TRASH)
        return found, *given, step.lacking, len(self._written), version

    def export(self, candidates: bool) -> tuple[np.ndarray, ...]:
        known = self._known[:, (self._known[_ROW] == ABSENT) == candidates]
        return (*known[[_KEY, _ROW, _FREQUENCY, _LAST_USED]],)

    def replace(self, *known: np.ndarray) -> int:
        size = len(known[_KEY])
        self._capacity = self._grown(size)
        self._add_rows(FIRST_ROW + self._capacity)
        self._known = self._known[:, :0]
        if self._rules.threshold:
            candidates = np.stack([*known[3:6], np.zeros_like(known[3])])
            self._known = _merged(self._known, candidates)
        live = np.stack([*known[:3], FIRST_ROW + np.arange(size)])
        self._known = _merged(self._known, live)
        self._forget()
        self._unpublished = [self._mark(np.arange(len(self._written)))]
        return self._version

    def remove(self, keys: np.ndarray, evicted: bool) -> np.ndarray:
        rows, size = _values(self._known, _ROW, keys), self._size()
        columns = _find(self._known, keys)
        self._delete(columns[columns >= 0])
        self._statistics[5] += evicted * (size - self._size())
        return rows

    def _size(self) -> int:
        """Returns the number of keys with rows."""
        return int(np.count_nonzero(self._known[_ROW] != ABSENT))

    def _decide(
        self, keys: np.ndarray, counts: np.ndarray, number: np.ndarray
    ) -> _Step:
        """Decides how a step changes the table; changes nothing."""
        rules, size = self._rules, self._size()
        if not len(counts):
            counts = np.ones_like(keys)
        counted = counts > 0
        distinct, places = np.unique(keys[counted], return_inverse=True)
        occurrences = np.zeros_like(distinct)
        np.add.at(occurrences, places, counts[counted])
        rows = _values(self._known, _ROW, distinct)
        here = rows != ABSENT
        hits = int(np.sum(occurrences[here]))
        occurrences += _values(self._known, _FREQUENCY, distinct)
        admitted = ~here & self._admits(distinct, occurrences, number)
        needed = size + int(np.sum(admitted))
        # Expired keys are evicted before the capacity grows, others after.
        expired = 0
        if rules.ttl and needed > self._capacity:
            last_used = self._known[_LAST_USED, self._others(distinct)]
            expired = int(np.sum(last_used < number - rules.ttl))
            expired = min(expired, needed - self._capacity)
        capacity = self._grown(needed - expired)
        lacking, others = max(0, needed - expired - capacity), 0
        if rules.evicts and rules.policy != "none":
            others = min(lacking, size - int(np.sum(here)) - expired)
        steps = np.full_like(distinct, number)
        return _Step(
            counted,
            places,
            np.stack([distinct, occurrences, steps, rows]),
            hits,
            admitted,
            expired + others,
            capacity,
            lacking - others,
        )

    def _admits(
        self, keys: np.ndarray, occurrences: np.ndarray, number: np.ndarray
    ) -> np.ndarray:
        """Returns which of unknown keys get a row, [n] bool."""
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
        """Returns the capacity for so many keys, or the largest allowed."""
        capacity = self._capacity
        while capacity < keys and capacity < self._rules.max_capacity:
            capacity = min(2 * capacity, self._rules.max_capacity)
        return capacity

    def _others(self, keys: np.ndarray) -> np.ndarray:
        """Returns the columns of keys with rows that are not in `keys`."""
        others = self._known[_ROW] != ABSENT
        columns = _find(self._known, keys)
        others[columns[columns >= 0]] = False
        return np.flatnonzero(others)

    def _evict(self, step: _Step) -> None:
        evicted = _first_to_go(
            self._known,
            self._others(step.known[_KEY]),
            step.evicted,
            by_frequency=self._rules.policy == "lfu",
        )
        self._delete(evicted)

    def _delete(self, columns: np.ndarray) -> None:
        """Forgets known keys, and notes those that had rows."""
        if self._removed is not None:
            keys, rows = self._known[[_KEY, _ROW]][:, columns]
            self._removed = np.append(self._removed, keys[rows != ABSENT])
            if len(self._removed) > 2 * self._capacity:
                self._removed, self._missed = self._removed[:0], True
        self._known = np.delete(self._known, columns, 1)

    def take_removed(self) -> tuple[np.ndarray, np.ndarray]:
        removed, missed = self._removed, self._missed
        self._removed, self._missed = np.zeros([0], np.int64), False
        if removed is None:
            removed = self._removed
        return removed, np.array([missed])

    def _add_rows(self, physical: int) -> None:
        """Makes at least so many rows."""
        more = max(0, physical - len(self._written))
        self._written = np.pad(self._written, (0, more))

    def _free_rows(self) -> np.ndarray:
        """Returns the rows without a key."""
        free = np.ones(len(self._written), bool)
        free[:FIRST_ROW] = False
        free[self._known[_ROW]] = False
        return np.flatnonzero(free)

    def _spare_rows(self, count: int) -> np.ndarray:
        """Returns free rows; other ones than before, if there are enough."""
        self._add_rows(FIRST_ROW + self._size() + count)
        free = self._free_rows()
        start = np.searchsorted(free, self._last_spare, "right")
        rows = free[(start + np.arange(count)) % max(1, len(free))]
        self._last_spare = rows[-1] if count else self._last_spare
        return rows

    def _published(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows, `ABSENT` for those whose commit is unpublished."""
        hidden = np.isin(self._written[rows], self._unpublished)
        return np.where(hidden, ABSENT, rows)

    def _mark(self, rows: np.ndarray) -> int:
        """Marks rows as written; returns the new version."""
        self._version += 1
        self._written[rows] = self._version
        return self._version

    def _forget(self) -> None:
        """Drops the candidates seen longest ago if there are too many."""
        candidates = np.flatnonzero(self._known[_ROW] == ABSENT)
        excess = len(candidates) - self._rules.candidates
        if excess > 0:
            gone = _first_to_go(self._known, candidates, excess)
            self._known = np.delete(self._known, gone, 1)


def _find(known: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Returns the keys' columns in `known`; -1 for keys that it lacks."""
    if not known.shape[1]:
        return np.full(len(keys), -1)
    columns = np.searchsorted(known[_KEY], keys)
    columns = np.minimum(columns, known.shape[1] - 1)
    return np.where(known[_KEY, columns] == keys, columns, -1)


def _values(known: np.ndarray, which: int, keys: np.ndarray) -> np.ndarray:
    """Returns a row of `known` for keys; 0 for keys that it lacks."""
    columns = _find(known, keys)
    values = np.zeros_like(keys)
    values[columns >= 0] = known[which, columns[columns >= 0]]
    return values


def _merged(known: np.ndarray, more: np.ndarray) -> np.ndarray:
    """Returns `known` with keys replaced and added; may change `known`."""
    columns = _find(known, more[_KEY])
    old = columns >= 0
    known[:, columns[old]] = more[:, old]
    if old.all():
        return known
    known = np.concatenate([known, more[:, ~old]], 1)
    return np.take(known, np.argsort(known[_KEY], kind="stable"), 1)


def _first_to_go(
    known: np.ndarray,
    columns: np.ndarray,
    count: int,
    by_frequency: bool = False,
) -> np.ndarray:
    """Returns up to `count` of the columns, in the order of eviction."""
    score = known[_FREQUENCY if by_frequency else _LAST_USED, columns]
    if count < len(columns):  # To sort fewer.
        last = np.partition(score, count - 1)[count - 1]
        columns = columns[score <= last]
    by = [_KEY, _LAST_USED, _FREQUENCY][: 2 + by_frequency]
    order = np.lexsort([known[each, columns] for each in by])
    return columns[order[:count]]


def _mix(bits: np.ndarray) -> np.ndarray:
    """Applies splitmix64's finaliser to [n] uint64."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
