"""A shard's keys in numpy, for where there are no kernels."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.engines.tables.key_rules import (
    ABSENT,
    FIRST_ROW,
    TRASH,
    KeyRules,
)
from tfrs_embed.unmirrored import make_variable

#: The operations that take one table; the others take several.
OF_ONE_TABLE = ("export", "replace", "remove")

# A step that fails between its commit and its publication leaves its commit
# unpublished, until so many others follow.
_MOST_UNPUBLISHED = 16


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
            if name in OF_ONE_TABLE:
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
    """A step's distinct keys, and where they came from."""

    counted: np.ndarray  # [n] bool: the entries that count.
    key_of: np.ndarray  # [number of these]: which of the keys each one is.
    keys: np.ndarray  # [u], of which the others are.
    occurrences: np.ndarray  # With those that a candidate had before.
    rows: np.ndarray
    hits: int
    unknown: np.ndarray  # Which have no row, [v],
    places: np.ndarray  # and their places among the candidates, [v];
    admitted: np.ndarray  # which get one.

    def of_entries(self, values: np.ndarray, default: int) -> np.ndarray:
        result = np.full(len(self.counted), default, np.int64)
        result[self.counted] = values[self.key_of]
        return result


class _Room(NamedTuple):
    """How room is made for new keys."""

    capacity: int
    expired: np.ndarray  # Rows that go.
    least: int  # How many others go.
    lacking: int


class _Table:
    """The keys. Whoever calls a method without an underscore has the lock."""

    def __init__(self, rules: KeyRules) -> None:
        self._rules = rules
        self.lock = threading.Lock()
        self._capacity = rules.capacity
        self._physical = FIRST_ROW + rules.capacity
        self._shown = ABSENT  # The last row that a plan has shown.
        self._live = _Store(self._physical)
        self._candidates = _Store(1)
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

    def _hide(self, rows: np.ndarray) -> np.ndarray:
        hidden = np.isin(self._written[rows], self._unpublished)
        return np.where(hidden, ABSENT, rows)

    def _stamp(self, rows: np.ndarray) -> int:
        self._version += 1
        self._written[rows] = self._version
        return self._version

    def plan(
        self, keys: np.ndarray, counts: np.ndarray, number: np.ndarray
    ) -> tuple[Any, ...]:
        step = self._read(keys, counts, number)
        room = self._find_room(step, number)
        new = np.zeros([0], np.int64)
        if not room.lacking:
            self._raise(FIRST_ROW + room.capacity)
            new = self._show(len(step.admitted))
            step.rows[step.admitted] = new
        rows = self._hide(step.of_entries(step.rows, ABSENT))
        if len(new):
            self._stamp(new)
        new_keys = step.keys[step.admitted[: len(new)]]
        return rows, new_keys, new, room.lacking, self._physical, self._version

    def commit(
        self,
        keys: np.ndarray,
        counts: np.ndarray,
        hints: np.ndarray,
        number: np.ndarray,
    ) -> tuple[Any, ...]:
        del hints  # Keys are searched for without them.
        step = self._read(keys, counts, number)
        room = self._find_room(step, number)
        if room.lacking:
            none = np.zeros([0], np.int64)
            rows = np.full(len(keys), TRASH)
            return rows, none, none, room.lacking, self._physical, 0
        evicted = self._evict(step, room)
        known = step.rows != ABSENT
        self._live.use(step.rows[known], step.occurrences[known], number)
        self._capacity = room.capacity
        self._raise(FIRST_ROW + self._capacity)
        new_rows = self._free_rows()[: len(step.admitted)]
        new_keys = step.keys[step.admitted]
        self._live.insert(
            new_rows, new_keys, step.occurrences[step.admitted], number
        )
        step.rows[step.admitted] = new_rows
        version = 0
        if len(new_rows):
            version = self._stamp(new_rows)
            self._unpublished.append(version)
            del self._unpublished[:-_MOST_UNPUBLISHED]
        if self._rules.threshold:
            self._remember(step, number)
        rejected = len(step.unknown) - len(new_keys)
        self._statistics[:4] = len(new_keys), evicted, rejected, step.hits
        self._statistics[4:] += self._statistics[:4]
        rows = step.of_entries(step.rows, TRASH)
        rows[rows == ABSENT] = TRASH
        return rows, new_keys, new_rows, room.lacking, self._physical, version

    def export(self, candidates: bool) -> tuple[np.ndarray, ...]:
        store = self._candidates if candidates else self._live
        places = np.flatnonzero(store.live)
        return (
            store.keys[places],
            places,
            store.frequency[places],
            store.last_used[places],
        )

    def replace(
        self,
        keys: np.ndarray,
        frequency: np.ndarray,
        last_used: np.ndarray,
        candidate_keys: np.ndarray,
        candidate_frequency: np.ndarray,
        last_seen: np.ndarray,
    ) -> int:
        self._capacity = self._grown(len(keys))
        self._raise(FIRST_ROW + self._capacity)
        self._live = _Store(self._physical)
        rows = FIRST_ROW + np.arange(len(keys))
        self._live.insert(rows, keys, frequency, last_used)
        self._candidates = _Store(1)
        if self._rules.threshold:
            new = self._live.find(candidate_keys) == ABSENT
            self._candidates.insert(
                1 + np.arange(np.sum(new)),
                candidate_keys[new],
                candidate_frequency[new],
                last_seen[new],
            )
            self._forget_candidates()
        self._unpublished = [self._stamp(np.arange(self._physical))]
        return self._version

    def remove(self, keys: np.ndarray, evicted: bool) -> np.ndarray:
        rows = self._live.find(keys)
        gone = np.unique(rows[rows != ABSENT])
        self._live.erase(gone)
        if evicted:
            self._statistics[5] += len(gone)
        places = np.unique(self._candidates.find(keys))
        self._candidates.erase(places[places != 0])
        return rows

    def _read(
        self, keys: np.ndarray, counts: np.ndarray, number: np.ndarray
    ) -> _Step:
        """Reads a step's keys; changes nothing."""
        if not len(counts):
            counts = np.ones_like(keys)
        counted = counts > 0
        distinct, index = np.unique(keys[counted], return_inverse=True)
        occurrences = np.zeros_like(distinct)
        np.add.at(occurrences, index, counts[counted])
        rows = self._live.find(distinct)
        hits = int(np.sum(occurrences[rows != ABSENT]))
        unknown = np.flatnonzero(rows == ABSENT)
        places = self._candidates.find(distinct[unknown])
        occurrences[unknown] += np.where(
            places != 0, self._candidates.frequency[places], 0
        )
        yes = self._admits(distinct[unknown], occurrences[unknown], number)
        return _Step(
            counted,
            index,
            distinct,
            occurrences,
            rows,
            hits,
            unknown,
            places,
            unknown[yes],
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

    def _find_room(self, step: _Step, number: np.ndarray) -> _Room:
        rules = self._rules
        size = len(self._live)
        keys = size + len(step.admitted)
        expired = np.zeros([0], np.int64)
        if rules.ttl and keys > self._capacity:
            old = self._live.last_used < number - rules.ttl
            rows = np.flatnonzero(self._may_go(step) & old)
            expired = self._live.least(rows, keys - self._capacity, False)
            keys -= len(expired)
        capacity = self._grown(keys)
        lacking, least = max(0, keys - capacity), 0
        if rules.evicts and rules.policy != "none":
            pinned = len(step.keys) - len(step.unknown)
            least = min(lacking, size - len(expired) - pinned)
        return _Room(capacity, expired, least, lacking - least)

    def _may_go(self, step: _Step) -> np.ndarray:
        """Which rows have keys that the step doesn't use, [rows] bool."""
        free = self._live.live.copy()
        free[step.rows] = False
        return free

    def _evict(self, step: _Step, room: _Room) -> int:
        """Makes the room; returns how many keys are gone."""
        rows = room.expired
        if room.least:
            rest = self._may_go(step)
            rest[rows] = False
            by_frequency = self._rules.policy == "lfu"
            others = self._live.least(
                np.flatnonzero(rest), room.least, by_frequency
            )
            rows = np.concatenate([rows, others])
        self._live.erase(rows)
        return len(rows)

    def _raise(self, physical: int) -> None:
        self._physical = max(self._physical, physical)
        self._live.reserve(self._physical)
        more = self._physical - len(self._written)
        if more > 0:
            self._written = np.pad(self._written, (0, more))

    def _free_rows(self) -> np.ndarray:
        free = ~self._live.live[FIRST_ROW : self._physical]
        return FIRST_ROW + np.flatnonzero(free)

    def _show(self, count: int) -> np.ndarray:
        """Rows that stay free, not the last time's if there are enough."""
        if not count:
            return np.zeros([0], np.int64)
        self._raise(FIRST_ROW + len(self._live) + count)
        free = self._free_rows()
        start = np.searchsorted(free, self._shown, "right")
        shown = np.take(free, start + np.arange(count), mode="wrap")
        self._shown = shown[-1]
        return shown

    def _remember(self, step: _Step, number: np.ndarray) -> None:
        """Remembers the unknown keys that have not been admitted."""
        store = self._candidates
        admitted = step.rows[step.unknown] != ABSENT
        seen = step.places != 0
        store.erase(step.places[admitted & seen])
        rest = seen & ~admitted
        store.frequency[step.places[rest]] = step.occurrences[
            step.unknown[rest]
        ]
        store.last_used[step.places[rest]] = number
        new = step.unknown[~seen & ~admitted]
        store.reserve(1 + len(store) + len(new))
        free = 1 + np.flatnonzero(~store.live[1:])[: len(new)]
        store.insert(free, step.keys[new], step.occurrences[new], number)
        self._forget_candidates()

    def _forget_candidates(self) -> None:
        """Forgets those that are too many, which were seen longest ago."""
        store = self._candidates
        excess = len(store) - self._rules.candidates
        if excess > 0:
            every = np.flatnonzero(store.live)
            store.erase(store.least(every, excess, False))


class _Store:
    """Keys at places, the first of which is never used."""

    def __init__(self, size: int) -> None:
        self._place_of: dict[int, int] = {}
        self.live = np.zeros([size], bool)
        self.keys = np.zeros([size], np.int64)
        self.frequency = np.zeros([size], np.int64)
        self.last_used = np.zeros([size], np.int64)

    def __len__(self) -> int:
        return len(self._place_of)

    def reserve(self, size: int) -> None:
        """Makes so many places, and twice as many as there were if any."""
        if size <= len(self.live):
            return
        more = (0, max(size, 2 * len(self.live)) - len(self.live))
        self.live = np.pad(self.live, more)
        self.keys = np.pad(self.keys, more)
        self.frequency = np.pad(self.frequency, more)
        self.last_used = np.pad(self.last_used, more)

    def find(self, keys: np.ndarray) -> np.ndarray:
        found = map(self._place_of.get, keys.tolist(), itertools.repeat(0))
        return np.fromiter(found, np.int64, len(keys))

    def insert(
        self,
        places: np.ndarray,
        keys: np.ndarray,
        frequency: np.ndarray,
        last_used: np.ndarray,
    ) -> None:
        """Gives places to keys that have none."""
        if len(places):
            self.reserve(int(places.max()) + 1)
        self._place_of.update(zip(keys.tolist(), places.tolist(), strict=True))
        self.live[places] = True
        self.keys[places] = keys
        self.frequency[places] = frequency
        self.last_used[places] = last_used

    def use(
        self, places: np.ndarray, occurrences: np.ndarray, number: np.ndarray
    ) -> None:
        self.frequency[places] += occurrences
        self.last_used[places] = number

    def erase(self, places: np.ndarray) -> None:
        for key in self.keys[places].tolist():
            del self._place_of[key]
        self.live[places] = False

    def least(
        self, places: np.ndarray, count: int, by_frequency: bool
    ) -> np.ndarray:
        """The places of up to so many keys with the least scores."""
        scores = [self.last_used, self.keys]
        if by_frequency:
            scores.insert(0, self.frequency)
        chosen = []
        for score in scores:
            if count >= len(places) or count <= 0:
                break
            values = score[places]
            last = np.partition(values, count - 1)[count - 1]
            chosen.append(places[values < last])
            places = places[values == last]
            count -= len(chosen[-1])
        return np.concatenate([*chosen, places[: max(0, count)]])


def _mix(bits: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser, of [n] uint64."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
