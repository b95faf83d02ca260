"""The keys of a shard in plain Python, for machines without kernels.

It is slow. `kernels/cc/key_table.h` explains the operations, which have the
names of the kernels'.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.unmirrored import make_variable
from tfrs_embed.storage.key_rules import (
    ABSENT,
    FIRST_ROW,
    TRASH,
    KeyRules,
    LiveKeys,
    eviction_order,
    is_expired,
)

# The operations that take one table; the others take several.
_OF_ONE_TABLE = ("export", "replace", "remove", "score", "take_removed")
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
    "score": [1],
    "take_removed": [1, 1],
}
_LIKE_INPUT = ("find", "check", "reserve", "commit", "remove", "score")

# The commit of a step that fails before its publication stays unpublished,
# until so many others follow.
_MOST_UNPUBLISHED = 16
_LONG_AGO = -(2**63)

#: What is known of keys: each one's row, `ABSENT` for a candidate, its
#: frequency, and the moment of its last use.
_Known = dict[int, list[int]]
_NEW = [ABSENT, 0, 0]


def run(tables: Sequence[PlainKeys], name: str, *inputs: Any) -> Any:
    """Runs the operation with this name, a method of `PlainKeys`."""
    # Graphs may outlive everything else: see EngineLayer.
    references = [weakref.ref(table) for table in tables]

    def call(before: Any, *values: Any) -> list[np.ndarray]:
        del before  # An input, so that the call is no constant.
        alive = [reference() for reference in references]
        if None in alive:
            raise RuntimeError("The table of these keys is gone.")
        with _LOCK:
            found = _call(alive, name, values)
        return [np.asarray(each, np.int64) for each in found]

    # Functions can't order calls of Python by a resource. TensorFlow would
    # order the calls of all tables, so that one replica would wait for another
    # that waits for it. Each call reads and writes these variables instead.
    calls = [table.calls for table in tables]
    before = tf.add_n([each.read_value() for each in calls])
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
        for each in calls:
            each.assign_add(one)
    for output, rank in zip(outputs, _RANKS[name], strict=True):
        output.set_shape([None] * rank)
    if name in _LIKE_INPUT:
        outputs[0].set_shape(inputs[0].shape)
    return outputs if len(outputs) > 1 else outputs[0]


_LOCK = threading.Lock()


def _call(tables: Any, name: str, values: Sequence[Any]) -> Sequence[Any]:
    """Calls the tables' methods, each with its part; joins the results."""
    if name in _OF_ONE_TABLE:
        return getattr(tables[0], name)(*values)
    if name == "info":
        return [np.stack([table.info() for table in tables])]
    if name == "publish":
        for table, version in zip(tables, np.ravel(values[0]), strict=True):
            table.publish(version)
        return [1]
    entries, table_of, *others = values
    first, rest = np.zeros(len(entries), np.int64), []
    for i, table in enumerate(tables):
        mine = table_of == i if len(tables) > 1 else slice(None)
        if name in ("reserve", "commit"):
            # A commit's other input are the reserved rows: plain keys are found
            # without them.
            counts, *_, moment = others
            counts = (
                counts[mine] if len(counts) else np.ones_like(entries)[mine]
            )
            found = table.step(
                entries[mine], counts, *moment.tolist(), name == "commit"
            )
        else:
            versions = (np.ravel(v)[i] for v in others)  # For "check".
            found = getattr(table, name)(entries[mine], *versions)
        first[mine], *more = found
        # A list of no keys would be of floats, and make all keys floats.
        rest.append([np.atleast_1d(np.asarray(v, np.int64)) for v in more])
    joined = [np.concatenate(each) for each in zip(*rest, strict=True)]
    return [first, np.sum(joined)] if name == "check" else [first, *joined]


class PlainKeys:
    """The keys of a table. `calls` is a variable that orders operations."""

    def __init__(self, rules: KeyRules) -> None:
        self.calls = make_variable(tf.constant(0, tf.int64), "calls")
        self._rules = rules
        self._capacity = rules.capacity
        self._last_spare = ABSENT  # The last row that `reserve` returned.
        # The last keys that lost their rows; None: nobody asks for them.
        self._removed: collections.deque[int] | None = None
        self._live: _Known = {}
        self._candidates: _Known = {}
        self._newest = _LONG_AGO  # The moment of a step.
        self._statistics = np.zeros([8], np.int64)
        # The version in which each row was last written.
        self._written = np.zeros([FIRST_ROW + rules.capacity], np.int64)
        self._version = 0
        self._unpublished: list[int] = []

    def info(self) -> list[int]:
        """Returns the numbers of `KeyTable.info`; there is no spill."""
        sizes = [len(self._live), self._capacity, len(self._written)]
        last = [len(self._unpublished), 0, 0, 0, 0]
        return [*sizes, *self._statistics, *last]

    def find(self, keys: np.ndarray) -> tuple[np.ndarray, int]:
        return self._published(_rows(self._live, keys)), self._version

    def check(self, rows: np.ndarray, version: int) -> tuple[Any, Any]:
        changed = self._written[rows] > version
        return np.where(changed, ABSENT, rows), np.sum(changed)

    def publish(self, version: int) -> None:
        if version in self._unpublished:
            self._unpublished.remove(version)

    def step(
        self,
        keys: np.ndarray,
        counts: np.ndarray,
        number: int,
        time: int,
        commits: bool,
    ) -> tuple[Any, ...]:
        """Returns a table's part of `KeyRows`, reserved or committed."""
        # A clock that has jumped back stands still.
        now = max(time, self._newest) if self._rules.by_time else number
        known, admitted, hits = self._count(keys, counts, number, now)
        gone, capacity, lacking = _make_room(
            self._rules,
            self._live,
            self._capacity,
            known,
            len(admitted),
            now,
        )
        new, version = np.zeros([0], np.int64), self._version * (not commits)
        if not lacking:
            if commits:
                self._capacity = capacity
                self._remove(gone)
            keys_then = max(capacity, len(self._live) + len(admitted))
            self._written = _with_rows(self._written, keys_then)
            is_free = np.arange(len(self._written)) >= FIRST_ROW
            is_free[[row for row, *_ in self._live.values()]] = False
            free, start = np.flatnonzero(is_free), 0
            if not commits:
                # Other rows than before, if there are enough.
                start = int(np.searchsorted(free, self._last_spare, "right"))
            places = start + np.arange(len(admitted))
            new = free[places % max(1, len(free))]
        new_keys = admitted[: len(new)]
        for key, row in zip(new_keys, new.tolist(), strict=True):
            known[key][0] = row
            if self._rules.scored:
                known[key][1] = 0
        rows = np.array(
            [
                known[key][0] if count > 0 else ABSENT
                for key, count in zip(keys.tolist(), counts, strict=True)
            ],
            np.int64,
        )
        if not commits:
            rows = self._published(rows)
        if len(new):
            version = self._mark(new)
            if commits:
                self._unpublished.append(version)
                del self._unpublished[:-_MOST_UNPUBLISHED]
            else:
                self._last_spare = new[-1]
        if commits and not lacking:
            self._newest = now
            rejected = self._keep(known)
            last = len(new), len(gone), rejected, hits
            self._statistics[:4] = last
            self._statistics[4:] += last
        rows[rows == ABSENT] = TRASH if commits else ABSENT
        sizes = len(new), lacking, len(self._written), version
        return rows, new_keys, new, *sizes

    def _keep(self, known: _Known) -> int:
        """Keeps what is known after a step; returns how many lack rows."""
        absent = {k: v for k, v in known.items() if v[0] == ABSENT}
        for key in known.keys() - absent.keys():
            self._candidates.pop(key, None)
            self._live[key] = known[key]
        self._candidates.update(absent if self._rules.threshold else {})
        _forget(self._candidates, self._rules.candidates)
        return len(absent)

    def export(self, candidates: bool) -> tuple[Any, ...]:
        return _as_arrays(self._candidates if candidates else self._live)

    def replace(self, *arrays: np.ndarray) -> list[int]:
        live, seen = np.stack(arrays[:3], 1), np.stack(arrays[3:6], 1)
        self._capacity = self._rules.grown(self._capacity, len(live))
        self._written = _with_rows(self._written, self._capacity)
        self._live = {
            key: [row, *counters]
            for row, (key, *counters) in enumerate(live.tolist(), FIRST_ROW)
        }
        self._candidates = {
            key: [ABSENT, *counters]
            for key, *counters in seen.tolist()
            if self._rules.threshold and key not in self._live
        }
        _forget(self._candidates, self._rules.candidates)
        self._newest = max(
            [_LONG_AGO, *arrays[2].tolist(), *arrays[5].tolist()]
        )
        self._unpublished = [self._mark(np.arange(len(self._written)))]
        return [self._version]

    def remove(self, keys: np.ndarray, evicted: bool) -> list[np.ndarray]:
        rows = _rows(self._live, keys)
        gone = {*keys.tolist()}
        for key in gone & self._candidates.keys():
            del self._candidates[key]
        gone &= self._live.keys()
        self._remove(gone)
        self._statistics[5] += evicted * len(gone)
        return [rows]

    def score(self, keys: np.ndarray, scores: np.ndarray) -> list[np.ndarray]:
        for key, score in zip(keys.tolist(), scores.tolist(), strict=True):
            if key in self._live:
                self._live[key][1] = score
        return [_rows(self._live, keys)]

    def take_removed(self) -> tuple[Any, ...]:
        removed = self._removed
        self._removed = collections.deque(maxlen=2 * self._capacity + 1)
        if removed is None:
            return [], [False]
        return [*removed], [len(removed) == removed.maxlen]

    def _count(
        self, keys: np.ndarray, counts: np.ndarray, number: int, now: int
    ) -> tuple[_Known, list[int], int]:
        """Counts a step's keys; changes nothing.

        Returns what is known of them after the step, the ones that get rows,
        ascending, and the occurrences of keys with rows.
        """
        known: _Known = {}
        hits = 0
        for key, count in zip(keys.tolist(), counts.tolist(), strict=True):
            if count > 0:
                before = self._live.get(key) or self._candidates.get(key, _NEW)
                row, frequency, last_used = known.get(key, before)
                if row != ABSENT:
                    frequency = self._rules.later(frequency, last_used, now)
                if row == ABSENT or not self._rules.scored:
                    frequency += count
                known[key] = [row, frequency, now]
                hits += count * (row != ABSENT)
        admitted = [
            key
            for key, (row, frequency, _) in sorted(known.items())
            if row == ABSENT and self._rules.admits(key, frequency, number)
        ]
        return known, admitted, hits

    def _remove(self, keys: Collection[int]) -> None:
        """Removes keys with rows, and notes them."""
        for key in keys:
            del self._live[key]
        if self._removed is not None:
            self._removed.extend(keys)

    def _published(self, rows: np.ndarray) -> np.ndarray:
        """Returns rows, `ABSENT` for those whose commit is unpublished."""
        hidden = np.isin(self._written[rows], self._unpublished)
        return np.where(hidden, ABSENT, rows)

    def _mark(self, rows: np.ndarray) -> int:
        """Marks rows as written; returns the new version."""
        self._version += 1
        self._written[rows] = self._version
        return self._version


def _make_room(
    rules: KeyRules,
    live: _Known,
    capacity: int,
    known: _Known,
    admitted: int,
    now: int,
) -> tuple[list[int], int, int]:
    """Decides how a step's keys find room.

    Returns the keys to evict, the capacity, and how many rows lack.
    """
    needed = len(live) + admitted
    if needed <= capacity:
        return [], capacity, 0
    others = {k: v for k, v in live.items() if k not in known}
    # Expired keys are evicted before the capacity grows, others after.
    seen = _as_arrays(others)
    expired = int(np.sum(is_expired(rules, seen.last_used, now)))
    full = capacity == rules.max_capacity
    gone = min(expired, needed - (rules.least if full else capacity))
    capacity = rules.grown(capacity, needed - gone)
    lacking = max(0, needed - gone - capacity)
    if rules.evicts and rules.policy != "none" and (full or lacking):
        more = min(needed - gone - rules.least, len(others) - gone)
        gone, lacking = gone + more, max(0, lacking - more)
    order = eviction_order(rules, seen, now)[:gone]
    return seen.keys[order].tolist(), capacity, lacking


def _with_rows(written: np.ndarray, keys: int) -> np.ndarray:
    """Returns the versions of at least the rows of so many keys."""
    return np.pad(written, (0, max(0, FIRST_ROW + keys - len(written))))


def _rows(live: _Known, keys: np.ndarray) -> np.ndarray:
    """Returns the rows of keys; `ABSENT` for a key without one."""
    rows = [live.get(key, _NEW)[0] for key in keys.tolist()]
    return np.array(rows, np.int64)


def _as_arrays(known: _Known) -> LiveKeys:
    """Returns keys and what is known of them."""
    each = [(key, *of_key) for key, of_key in known.items()]
    return LiveKeys(*np.array(each, np.int64).reshape([-1, 4]).T)


def _forget(candidates: _Known, most: int) -> None:
    """Drops the candidates seen longest ago if there are too many."""
    excess = max(0, len(candidates) - most)
    seen = _as_arrays(candidates)
    oldest = np.lexsort([seen.keys, seen.last_used])[:excess]
    for key in seen.keys[oldest].tolist():
        del candidates[key]
