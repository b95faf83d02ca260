"""The keys of one shard: which are admitted, which are evicted.

A training step reserves rows, then commits. Reserving serves the lookup: it
returns the rows to read. A key that the commit will admit gets a row that no
key has, for its initial values. Committing serves the update: it counts the
keys, evicts and admits, and returns the rows to write.

Other threads read meanwhile. A reader finds rows, reads them, and then checks
that they were not written for other keys in between. Keys that a commit admits
are not found until `publish`, after their rows are written.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.compat import graphs
from tfrs_embed.storage import plain_keys
from tfrs_embed.storage.fallback_rows import FallbackRows
from tfrs_embed.storage.key_rules import KeyRules, LiveKeys
from tfrs_embed.storage.row_store import host_of

if TYPE_CHECKING:
    from tfrs_embed.storage.spill import Spill

#: Where `KeyTable.info` has the number of keys in the spill.
SPILL_KEYS = 12


class KeyRows(NamedTuple):
    """The rows that a step's keys have, or would have.

    Attributes:
        rows: [n] int64, the keys' rows. For a key that has none and is not
            admitted, its shared row, if the table has fallback rows. Else, and
            for an entry with count 0, `ABSENT` if reserved and `TRASH` if
            committed.
        new_keys: [m] int64, the keys that are admitted, or would be, table
            after table.
        new_rows: [m] int64, the new keys' rows. Reserved: rows of no key.
            Committed: their rows, which the caller has to reset.
        new_sizes: [tables] int64, how many new keys each table has.
        lacking: [tables] int64, how many rows each table lacks; if not 0, the
            table is unchanged and its other values mean nothing.
        physical: [tables] int64, how many rows the variables must have.
        versions: [tables] int64, for `KeyTable.publish` after a commit.
        initial: [m, dim] float32, the initial values of new keys that
            `reservation.reserve` has written; else None.
    """

    rows: tf.Tensor
    new_keys: tf.Tensor
    new_rows: tf.Tensor
    new_sizes: tf.Tensor
    lacking: tf.Tensor
    physical: tf.Tensor
    versions: tf.Tensor
    initial: tf.Tensor | None = None


class FoundKeys(NamedTuple):
    """The rows of keys at a moment.

    Attributes:
        rows: [n] int64, the keys' rows. For a key without one its shared row,
            if the table has fallback rows, else `ABSENT`.
        keys: [n] int64.
        table_of: [n] int32, each key's table; None: there is one table.
        versions: [tables] int64, for `KeyTable.check`.
        spilled: [n] int64, each key's vector in `vectors`; 0 for a key that
            isn't in a spill. None: no table has a spill.
        vectors: [m, dim] float32, from spills; the first belongs to no key.
    """

    rows: tf.Tensor
    keys: tf.Tensor
    table_of: tf.Tensor | None
    versions: tf.Tensor
    spilled: tf.Tensor | None = None
    vectors: tf.Tensor | None = None

    def with_spilled(self, vectors: tf.Tensor) -> tf.Tensor:
        """Returns vectors, [n, dim], with those from spills in place."""
        if self.spilled is None:
            return vectors
        there = tf.greater(self.spilled, 0)[:, None]
        return tf.where(there, tf.gather(self.vectors, self.spilled), vectors)


class KeyNumbers(NamedTuple):
    """The numbers of one table's keys.

    Attributes:
        size: how many keys have rows.
        capacity: how many keys can have rows now.
        physical: how many rows the variables must have; it never falls.
        last: counts of the last successful commit: keys admitted, keys evicted,
            keys that got no row, occurrences of keys that had rows before.
        total: these counts of all commits.
        unpublished: how many commits are not published.
        spill: of the spill its keys, its bytes, and how many rows were written
            to it and have come back.
    """

    size: int
    capacity: int
    physical: int
    last: tuple[int, ...]
    total: tuple[int, ...]
    unpublished: int
    spill: tuple[int, ...]


class KeyTable:
    """The keys of tables on one shard; strategies don't mirror them.

    It is made for one table. `joined` makes one of several tables, whose keys
    one operation finds and changes. Operations in a traced function run in the
    order of tracing. Several threads may use it. In all methods `keys` is [n]
    int64, and `table_of` is [n] int32, each key's table, or None if there is
    one table.

    Rows are numbers of rows of variables. These have, in this order, the rows
    `ABSENT` and `TRASH`, the fallback rows, and from `first_row` on the rows of
    keys. The operations of the kernels and of `PlainKeys` know no fallback
    rows: keys' rows begin at `FIRST_ROW` there.

    Args:
        rules: when keys get and lose rows.
        device: the shard's.
        spill: where evicted keys' rows go; None: they are gone.
        name: the table's.

    Attributes:
        names: the tables' names.
        rules: when keys get and lose rows.
        fallback: the rows that keys without a row share.
        first_row: the first row of keys.
        host: the device of the keys.

    Raises:
        RuntimeError: there is to be a spill, and there are no kernels.
    """

    def __init__(
        self,
        rules: KeyRules,
        device: str | None = None,
        spill: Spill | None = None,
        name: str = "",
    ) -> None:
        self.names = [name]
        self.rules = rules
        # Beside the rows, if those are on a CPU: spills need it.
        self.host: str = host_of(device)
        self.fallback = FallbackRows(rules, self.host)
        self.first_row = self.fallback.end
        self._spills = [] if spill is None else [spill]
        with tf.init_scope(), tf.device(self.host):
            self._kernels: Any = None
            if spill is not None:
                self._kernels = spill.operations()
            elif tf.executing_eagerly():
                self._kernels = kernels.operations(self.host)
            # The kernels' handles, or `PlainKeys`.
            self._tables: list[Any] = [
                _make_handle(self._kernels, rules, spill)
                if self._kernels
                else plain_keys.PlainKeys(rules)
            ]

    @classmethod
    def joined(cls, tables: Sequence[KeyTable]) -> KeyTable:
        """Returns the keys of tables that have equally many fallback rows."""
        if len(tables) == 1:
            return tables[0]
        joined = copy.copy(tables[0])
        joined.names = [name for table in tables for name in table.names]
        joined._tables = [each for table in tables for each in table._tables]
        joined._spills = [each for table in tables for each in table._spills]
        return joined

    def _run(self, name: str, *inputs: Any, **attributes: Any) -> Any:
        with tf.device(self.host):
            if self._kernels is None:
                return plain_keys.run(self._tables, name, *inputs)
            if name == "commit":
                # The variables of tables with a spill.
                memory = [s.variables.values() for s in self._spills]
                inputs = (*inputs, [v.handle for each in memory for v in each])
            operation = getattr(self._kernels, f"tfrs_embed_key_tables_{name}")
            return operation(self._tables, *inputs, **attributes)

    def lookup(
        self,
        keys: tf.Tensor,
        table_of: tf.Tensor | None = None,
        in_memory: bool = False,
        shared: bool = True,
    ) -> FoundKeys:
        """Finds the rows of keys, to read and then `check`.

        `in_memory` says whether the vectors that are found are also those of
        rows in memory, where tables have spills. Unless `shared`, the row of a
        key without one is `ABSENT`.
        """
        if not self._spills:
            rows, versions = self._run("find", keys, _given(table_of))
            own = (
                self.fallback.own_or_shared(rows, keys)
                if shared
                else self.fallback.own(rows)
            )
            return FoundKeys(own, keys, table_of, versions)
        rows, versions, *spilled = self._run(
            "lookup_spilled",
            keys,
            _given(table_of),
            [s.parameters.handle for s in self._spills if in_memory],
            dim=self._spills[0].dim,
            T=tf.float32,
        )
        return FoundKeys(rows, keys, table_of, versions, *spilled)

    def check(self, found: FoundKeys) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns rows, other ones for stale ones; and how many those are.

        Rows are stale that were given to another key, or reserved, since
        `lookup`. The others are those of keys without a row. The number is a
        scalar int64.
        """
        rows = self.fallback.as_input(found.rows)
        current, changed = self._run(
            "check", rows, _given(found.table_of), found.versions
        )
        return self.fallback.own_or_shared(current, found.keys), changed

    def check_vectors(
        self,
        found: FoundKeys,
        vectors: tf.Tensor,
        read: Callable[[tf.Tensor], tf.Tensor],
    ) -> tf.Tensor:
        """Returns vectors, [n, dim], others where a row changed its key.

        The vectors were read from the rows after `lookup`. The others are those
        of keys without a row; `read` reads rows. Vectors from spills replace
        the vectors of their keys.
        """
        with tf.control_dependencies(graphs.capture([vectors])):
            rows, changed = self.check(found)

        def change() -> tf.Tensor:
            others = read(rows)
            if found.spilled is not None:
                # Keys that lost their rows meanwhile may have new ones.
                now = self.lookup(found.keys, found.table_of, in_memory=True)
                others = now.with_spilled(others)
            same = tf.equal(rows, found.rows)[:, None]
            return tf.where(same, vectors, others)

        checked = tf.cond(changed > 0, change, lambda: vectors)
        return found.with_spilled(checked)

    def publish(self, versions: tf.Tensor) -> None:
        """Lets a commit's new keys be found, after their rows were written."""
        self._run("publish", versions)

    def reserve(
        self,
        keys: tf.Tensor,
        counts: tf.Tensor | None,
        step: tf.Tensor,
        table_of: tf.Tensor | None = None,
    ) -> KeyRows:
        """Returns the rows that `commit` would give; changes nothing visible.

        Keys may repeat. `counts`, [n] int64, are each entry's occurrences; 0
        does not count; None means 1 each. `step`, [2] int64, is the step's
        number, and its time in microseconds since 1970; or a scalar, its number
        alone, if no table counts in time. Without a commit between them, a
        second call returns other free rows than the first, if there are enough.
        """
        given = _given(table_of), _or_none(counts)
        found = self._run("reserve", keys, *given, _moment(step))
        return self._in_variables(KeyRows(*found), keys, counts)

    def commit(
        self,
        keys: tf.Tensor,
        counts: tf.Tensor | None,
        rows: tf.Tensor,
        step: tf.Tensor,
        table_of: tf.Tensor | None = None,
    ) -> KeyRows:
        """Counts a step's keys, and gives rows to admitted ones.

        The arguments are those of `reserve`. `rows`, [n] int64, are the
        reserved rows: hints, without which it takes longer.
        """
        given = _given(table_of), _or_none(counts)
        hints = self.fallback.as_input(rows)
        found = self._run("commit", keys, *given, hints, _moment(step))
        return self._in_variables(KeyRows(*found), keys, counts)

    def _in_variables(
        self, found: KeyRows, keys: tf.Tensor, counts: tf.Tensor | None
    ) -> KeyRows:
        """Returns a step's rows, as operations give them, of variables."""
        fallback = self.fallback
        if not fallback.rules.fallback_rows:
            return found
        with tf.device(self.host):
            physical = found.physical + fallback.rules.fallback_rows_here
        return found._replace(
            rows=fallback.own_or_shared(found.rows, keys, counts),
            new_rows=fallback.own(found.new_rows),
            physical=physical,
        )

    def info(self) -> tf.Tensor:
        """Returns the `KeyNumbers` of each table, flat: [tables, 16] int64."""
        return self._run("info")

    # For a KeyTable of one table.

    def numbers(self) -> KeyNumbers:
        """Returns the table's numbers."""
        [n] = self.info().numpy().tolist()
        last, total, spill = (tuple(n[i : i + 4]) for i in (3, 7, SPILL_KEYS))
        physical = n[2] + self.rules.fallback_rows_here
        return KeyNumbers(n[0], n[1], physical, last, total, n[11], spill)

    def export(self, candidates: bool = False) -> LiveKeys:
        """Returns the keys with rows, at one moment, as tensors.

        Or the `candidates`: keys without rows that admission remembers.
        """
        keys, rows, *counters = self._run("export", candidates)
        return LiveKeys(keys, self.fallback.own(rows), *counters)

    def replace(
        self,
        keys: np.ndarray,
        frequency: np.ndarray,
        last_used: np.ndarray,
        candidates: np.ndarray,
        in_memory: int | None = None,
    ) -> tf.Tensor:
        """Replaces all keys; the capacity doubles as needed, up to its bound.

        Keys are unique; they and their counters are [n] int64. The first
        `in_memory`, at most `max_capacity`, get the rows in memory from
        `first_row` on, the others go to the spill; None: all are in memory.
        Candidates, [c, 3], are unique keys, numbers of occurrences and moments
        of last use. Those that are keys with rows are left out, then those seen
        longest ago if there are too many, and all without a threshold. Returns
        the version to publish.
        """
        size = len(keys) if in_memory is None else in_memory
        given = keys, frequency, last_used, *candidates.T, [size]
        arrays = [np.asarray(value, np.int64) for value in given]
        return self._run("replace", *arrays)

    def remove(self, keys: np.ndarray, evicted: bool = False) -> np.ndarray:
        """Removes keys and candidates; returns their rows, or `ABSENT`.

        If `evicted`, keys with rows count as evicted in the statistics.
        """
        keys = np.asarray(keys, np.int64)
        return self.fallback.own(self._run("remove", keys, evicted)).numpy()

    def score(self, keys: np.ndarray, scores: np.ndarray) -> np.ndarray:
        """Sets the scores of keys, numbers; returns their rows, or `ABSENT`.

        Keys without a row get none. For the policy "score" only.
        """
        given = np.asarray(keys, np.int64), np.asarray(scores, np.int64)
        return self.fallback.own(self._run("score", *given)).numpy()

    def take_removed(self) -> np.ndarray | None:
        """Returns the keys that have lost their rows since the last call.

        They are noted from the first call on. None: there were more than twice
        as many as have room, and the first ones are forgotten.
        """
        keys, missed = self._run("take_removed")
        return None if missed.numpy().any() else keys.numpy()


def _or_none(counts: tf.Tensor | None) -> tf.Tensor:
    return tf.zeros([0], tf.int64) if counts is None else counts


def _moment(step: tf.Tensor) -> tf.Tensor:
    """Returns a step's number and time, [2] int64."""
    step = tf.convert_to_tensor(step, tf.int64)
    return step if step.shape.rank else tf.stack([step, 0])


def _given(table_of: tf.Tensor | None) -> tf.Tensor:
    return tf.zeros([0], tf.int32) if table_of is None else table_of


def _make_handle(
    module: Any, rules: KeyRules, spill: Spill | None
) -> tf.Tensor:
    """Makes the kernels' table."""
    seed = rules.seed % 2**64
    handle = module.tfrs_embed_key_table(
        probability=tf.constant(rules.probability, tf.float64),
        capacity=rules.capacity,
        max_capacity=rules.max_capacity,
        candidates=rules.candidates,
        threshold=rules.threshold,
        seed=seed - 2**64 if seed >= 2**63 else seed,
        policy=rules.policy,
        ttl=rules.ttl,
        half_life=rules.half_life,
        by_time=rules.by_time,
        floor=rules.least,
        evicts=rules.evicts,
        **(spill.attributes() if spill else {}),
    )
    if spill is not None:
        spill.open(module, handle)
    return handle
