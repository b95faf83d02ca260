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

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.compat import graphs
from tfrs_embed.storage.key_rules import ABSENT, FIRST_ROW, KeyRules, Live
from tfrs_embed.storage.key_table_numpy import NumpyOperations
from tfrs_embed.storage.row_store import host_of

if TYPE_CHECKING:
    from tfrs_embed.storage.spill import Spill, SpillSettings

#: Where `KeyTables.info` has the number of keys in the spill.
SPILL_KEYS = 12


class GivenRows(NamedTuple):
    """The rows that a step's keys have, or would have.

    Attributes:
        rows: [n] int64, the keys' rows. For a key that has none and is not
            admitted, and for an entry with count 0, `ABSENT` if reserved and
            `TRASH` if committed.
        new_keys: [m] int64, the keys that are admitted, or would be, table
            after table.
        new_rows: [m] int64, the new keys' rows. Reserved: rows of no key.
            Committed: their rows, which the caller has to reset.
        new_sizes: [tables] int64, how many new keys each table has.
        lacking: [tables] int64, how many rows each table lacks; if not 0, the
            table is unchanged and its other values mean nothing.
        physical: [tables] int64, how many rows the variables must have.
        versions: [tables] int64, for `KeyTables.publish` after a commit.
    """

    rows: tf.Tensor
    new_keys: tf.Tensor
    new_rows: tf.Tensor
    new_sizes: tf.Tensor
    lacking: tf.Tensor
    physical: tf.Tensor
    versions: tf.Tensor


class Spilled(NamedTuple):
    """Vectors of keys that are in spills.

    Attributes:
        keys: [n] int64.
        index: [n] int64, each key's vector; 0 for a key that isn't there.
        vectors: [m, dim] float32; the first one belongs to no key.
    """

    keys: tf.Tensor
    index: tf.Tensor
    vectors: tf.Tensor

    def put_into(self, vectors: tf.Tensor) -> tf.Tensor:
        """Returns vectors, [n, dim], with those that are here in place."""
        here = tf.greater(self.index, 0)[:, None]
        return tf.where(here, tf.gather(self.vectors, self.index), vectors)


class Found(NamedTuple):
    """The rows of keys at a moment.

    Attributes:
        rows: [n] int64, the keys' rows; `ABSENT` for a key without one.
        table_of: [n] int32, each key's table; None: there is one table.
        versions: [tables] int64, for `KeyTables.check`.
        spilled: vectors of keys without a row; None: no table has a spill.
    """

    rows: tf.Tensor
    table_of: tf.Tensor | None
    versions: tf.Tensor
    spilled: Spilled | None = None


class KeyTables:
    """The keys of several tables on one shard; one operation serves all tables.

    Operations in a traced function run in the order of tracing. Several threads
    may use the tables. In all methods `keys` is [n] int64, and `table_of` is
    [n] int32, each key's table, or None if there is one table.
    """

    def __init__(self, tables: Sequence[KeyTable]) -> None:
        each: list[Any] = [table.operations for table in tables]
        self._operations = type(each[0]).together(each)
        self.host: str = tables[0].host
        self._spills = [table.spill for table in tables if table.spill]

    def _run(self, name: str, *inputs: Any, **attributes: Any) -> Any:
        with tf.device(self.host):
            return self._operations.run(name, *inputs, **attributes)

    def info(self) -> tf.Tensor:
        """Returns the numbers of each table, [tables, 16] int64.

        A table's numbers are: keys, capacity, physical rows, the eight of
        `KeyTable.statistics`, unpublished commits; and of its spill: keys,
        bytes, and how many rows were written to it and have come back.
        """
        return self._run("info")

    def look_up(
        self,
        keys: tf.Tensor,
        table_of: tf.Tensor | None = None,
        in_memory: bool = False,
    ) -> Found:
        """Finds the rows of keys, to read and then `check`.

        `in_memory` says whether the vectors that are found are also those of
        rows in memory, where tables have spills.
        """
        if not self._spills:
            rows, versions = self._run("find", keys, _given(table_of))
            return Found(rows, table_of, versions)
        rows, versions, *spilled = self._run(
            "look_up_spilled",
            keys,
            _given(table_of),
            [s.parameters.handle for s in self._spills if in_memory],
            dim=self._spills[0].dim,
            T=tf.float32,
        )
        return Found(rows, table_of, versions, Spilled(keys, *spilled))

    def check(self, found: Found) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns rows with `ABSENT` for stale ones; and how many those are.

        Rows are stale that were given to another key, or reserved, since
        `look_up`. Their number is a scalar int64.
        """
        rows, table_of, versions, _ = found
        current, changed = self._run("check", rows, _given(table_of), versions)
        return current, changed

    def check_vectors(self, found: Found, vectors: tf.Tensor) -> tf.Tensor:
        """Returns vectors, [n, dim], with zeros where a row changed its key.

        The vectors were read from the rows after `look_up`. Those of keys in
        spills replace them.
        """
        with tf.control_dependencies(graphs.here([vectors])):
            rows, changed = self.check(found)

        def change() -> tf.Tensor:
            others = tf.zeros_like(vectors)
            if found.spilled is not None:
                # Keys that lost their rows meanwhile may have new ones.
                keys, table_of = found.spilled.keys, found.table_of
                now = self.look_up(keys, table_of, in_memory=True).spilled
                others = now.put_into(others)  # type: ignore[union-attr]
            same = tf.equal(rows, found.rows)[:, None]
            return tf.where(same, vectors, others)

        checked: tf.Tensor = tf.cond(changed > 0, change, lambda: vectors)
        if found.spilled is not None:
            checked = found.spilled.put_into(checked)
        return checked

    def publish(self, versions: tf.Tensor) -> None:
        """Lets a commit's new keys be found, after their rows were written."""
        self._run("publish", versions)

    def reserve(
        self,
        keys: tf.Tensor,
        counts: tf.Tensor | None,
        step: tf.Tensor,
        table_of: tf.Tensor | None = None,
    ) -> GivenRows:
        """Returns the rows that `commit` would give; changes nothing visible.

        Keys may repeat. `counts`, [n] int64, are each entry's occurrences; 0
        does not count; None means 1 each. `step`, a scalar int64, is the step's
        number. Without a commit between them, a second call returns other free
        rows than the first, if there are enough.
        """
        found = self._run(
            "plan", keys, _given(table_of), _or_none(counts), step
        )
        return GivenRows(*found)

    def commit(
        self,
        keys: tf.Tensor,
        counts: tf.Tensor | None,
        rows: tf.Tensor,
        step: tf.Tensor,
        table_of: tf.Tensor | None = None,
    ) -> GivenRows:
        """Counts a step's keys, and gives rows to admitted ones.

        The arguments are those of `reserve`. `rows`, [n] int64, are the
        reserved rows: hints, without which it takes longer.
        """
        found = self._run(
            "commit", keys, _given(table_of), _or_none(counts), rows, step
        )
        return GivenRows(*found)


class KeyTable(KeyTables):
    """The keys of one table on one shard; strategies don't mirror it.

    `device` is the shard's.

    Attributes:
        host: the device of the keys.
        spill: the rows of evicted keys; None: they are gone.

    Raises:
        RuntimeError: there is to be a spill, and there are no kernels.
    """

    def __init__(
        self,
        rules: KeyRules,
        device: str | None = None,
        spill: SpillSettings | None = None,
    ) -> None:
        self.rules = rules
        # Beside the rows, if those are on a CPU: spills need it.
        self.host: str = host_of(device)
        self.spill: Spill | None = None
        self.operations: _KernelOperations | NumpyOperations
        with tf.init_scope(), tf.device(self.host):
            module = tf.executing_eagerly() and kernels.operations(self.host)
            if spill is not None:
                self.operations = _KernelOperations.of_table(
                    module, rules, spill
                )
                self.spill = self.operations.spill(spill)
            elif module:
                self.operations = _KernelOperations.of_table(module, rules)
            else:
                self.operations = NumpyOperations.of_table(rules)
        super().__init__([self])

    def size(self) -> tf.Tensor:
        """Returns the number of keys with rows, a scalar int64."""
        return self.info()[0, 0]

    def capacity(self) -> tf.Tensor:
        """Returns how many keys can have rows now, a scalar int64."""
        return self.info()[0, 1]

    def physical(self) -> tf.Tensor:
        """Returns how many rows the variables must have; it never falls."""
        return self.info()[0, 2]

    def find(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the keys' rows, [n] int64; `ABSENT` for a key without one."""
        rows = self._run("find", keys, _given(None))[0]
        if self.spill is None:
            return rows
        return tf.where(tf.equal(rows, ABSENT), self.spill.find(keys), rows)

    def live(self) -> Live:
        """Returns the keys with rows, at one moment."""
        return Live(*(x.numpy() for x in self._run("export", False)))

    def keys(self) -> tf.Tensor:
        """Returns the keys with rows, [n] int64, in any order."""
        keys: tf.Tensor = self._run("export", False)[0]
        return keys

    def candidates(self) -> np.ndarray:
        """Returns the keys without rows that admission remembers, [c, 3] int64.

        In any order: a key, its number of occurrences, the step of the last
        one.
        """
        keys, _, *seen = self._run("export", True)
        return np.stack([keys, *seen], 1)

    def replace(
        self,
        live_keys: np.ndarray,
        frequency: np.ndarray,
        last_used: np.ndarray,
        candidates: np.ndarray,
        in_memory: int | None = None,
    ) -> tuple[np.ndarray, tf.Tensor]:
        """Replaces all keys; the capacity doubles as needed, up to its bound.

        Live keys are unique, at most `max_capacity`; their counters are [n]
        int64. The first `in_memory` are in memory, the others in the spill;
        None: all are in memory. Of the candidates, [c, 3] as `candidates`
        returns them with unique keys, live keys are left out, then those seen
        longest ago if there are too many, and all without a threshold. Returns
        the live keys' rows, in memory from `FIRST_ROW` on; and the version to
        publish.
        """
        size = len(live_keys) if in_memory is None else in_memory
        given = [live_keys, frequency, last_used, *candidates.T, [size]]
        version = self._run(
            "replace", *(np.asarray(value, np.int64) for value in given)
        )
        rows = FIRST_ROW + np.arange(len(live_keys))
        if self.spill is not None:
            rows[size:] = self.spill.find(live_keys[size:])
        return rows, version

    def remove(self, keys: np.ndarray, evicted: bool = False) -> np.ndarray:
        """Removes keys and candidates; returns their rows, or `ABSENT`.

        If `evicted`, keys with rows count as evicted in the statistics.
        """
        keys = np.asarray(keys, np.int64)
        return self._run("remove", keys, evicted).numpy()

    def take_removed(self) -> np.ndarray | None:
        """Returns the keys that have lost their rows since the last call.

        They are noted from the first call on. None: there were more than twice
        as many as have room, and the first ones are forgotten.
        """
        keys, missed = self._run("take_removed")
        return None if missed.numpy().any() else keys.numpy()

    def statistics(self) -> np.ndarray:
        """Returns counts of the last successful commit, then of all: [8] int64.

        Four numbers each: keys admitted, keys evicted, keys that got no row,
        occurrences of keys that had rows before.
        """
        return self.info().numpy()[0, 3:11]

    def of_spill(self) -> np.ndarray:
        """Returns the four numbers of the spill that `info` has."""
        return self.info().numpy()[0, SPILL_KEYS:]

    def moment(self) -> tuple[int, ...]:
        """Returns numbers that change when keys get or lose rows.

        It waits, up to a second, until all commits are published.
        """
        end = time.monotonic() + 1
        while True:
            [info] = self.info().numpy().tolist()
            size, admitted, evicted, unpublished = (
                info[i] for i in (0, 7, 8, 11)
            )
            if not unpublished or time.monotonic() > end:
                return size, admitted, evicted
            time.sleep(0.001)


def _or_none(counts: tf.Tensor | None) -> tf.Tensor:
    return tf.zeros([0], tf.int64) if counts is None else counts


def _given(table_of: tf.Tensor | None) -> tf.Tensor:
    return tf.zeros([0], tf.int32) if table_of is None else table_of


class _KernelOperations:
    """The compiled operations, on the tables' handles.

    `memory` has the variables of tables with a spill.
    """

    def __init__(
        self,
        module: Any,
        handles: Sequence[tf.Tensor],
        memory: Sequence[tf.Variable] = (),
    ) -> None:
        self._module = module
        self._handles = [*handles]
        self._memory = [*memory]

    @classmethod
    def of_table(
        cls, module: Any, rules: KeyRules, spill: SpillSettings | None = None
    ) -> _KernelOperations:
        """Makes a table."""
        seed = rules.seed % 2**64
        attributes = {} if spill is None else spill.attributes()
        handle = module.tfrs_embed_key_table(
            probability=tf.constant(rules.probability, tf.float64),
            capacity=rules.capacity,
            max_capacity=rules.max_capacity,
            candidates=rules.candidates,
            threshold=rules.threshold,
            seed=seed - 2**64 if seed >= 2**63 else seed,
            policy=rules.policy,
            ttl=rules.ttl,
            evicts=rules.evicts,
            **attributes,
        )
        memory = () if spill is None else spill.variables.values()
        return cls(module, [handle], [*memory])

    def spill(self, settings: SpillSettings) -> Spill:
        """Returns the spill of the only table."""
        # Few tables have one.
        from tfrs_embed.storage.spill import Spill

        return Spill(settings, self._module, self._handles[0])

    @classmethod
    def together(cls, each: Sequence[_KernelOperations]) -> _KernelOperations:
        """Returns the operations on several tables at once."""
        return cls(
            each[0]._module,
            [handle for e in each for handle in e._handles],
            [variable for e in each for variable in e._memory],
        )

    def run(self, name: str, *inputs: Any, **attributes: Any) -> Any:
        """Runs the operation with this name."""
        operation = getattr(self._module, f"tfrs_embed_key_tables_{name}")
        if name == "commit":
            inputs = (*inputs, [v.handle for v in self._memory])
        return operation(self._handles, *inputs, **attributes)
