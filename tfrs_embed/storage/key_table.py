"""The keys that have a shard's rows: which are admitted, which are evicted.

A training step reserves rows and then commits. The reservation is for the
lookup: it says which rows to read, and for keys that the commit will admit it
has rows that no key has, where their initial values can be written. The commit
is for the update: it counts the keys, evicts and admits, and says which rows to
write.

Other threads read rows meanwhile. A reader finds rows, reads them, and then
checks that they haven't been written for other keys since; and nobody finds the
keys that a commit admits before their rows are written and it is published.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.compat import graphs
from tfrs_embed.storage.key_rules import FIRST_ROW, KeyRules, Live
from tfrs_embed.storage.key_table_numpy import NumpyOperations

# Whatever the shard's device.
_HOST = "/device:CPU:0"


class GivenRows(NamedTuple):
    """The rows that a step's keys have, or would have.

    Attributes:
        rows: [n] int64, the keys' rows. Reserved: `ABSENT` for keys that have
            none and would not be admitted, and for entries that don't count.
            Committed: `TRASH` for these.
        new_keys: [m] int64, the keys that are admitted, or would be, table
            after table.
        new_rows: [m] int64, their rows. Reserved: rows of no key, which stand
            for theirs in `rows`. Committed: they have to be reset.
        new_sizes: [tables] int64, how many of these each table has.
        lacking: [tables] int64, how many rows too few a table has; if it isn't
            0, that table has not changed, and the rest has no meaning.
        physical: [tables] int64, how many rows variables must have.
        versions: [tables] int64, which `KeyTables.publish` takes of a commit.
    """

    rows: tf.Tensor
    new_keys: tf.Tensor
    new_rows: tf.Tensor
    new_sizes: tf.Tensor
    lacking: tf.Tensor
    physical: tf.Tensor
    versions: tf.Tensor


class Found(NamedTuple):
    """The rows of keys at a moment.

    Attributes:
        rows: [n] int64, the keys' rows; `ABSENT` for those without.
        table_of: [n] int32, the table of each; None: there is one.
        versions: [tables] int64; see `KeyTables.check`.
    """

    rows: tf.Tensor
    table_of: tf.Tensor | None
    versions: tf.Tensor


class KeyTables:
    """The keys of several tables' rows on one shard, by one operation for all.

    In a traced function its operations run in the order they are traced in.
    Several threads may use it.

    Args:
        tables: the tables.
    """

    def __init__(self, tables: Sequence[KeyTable]) -> None:
        each: list[Any] = [table.operations for table in tables]
        self._operations = type(each[0]).together(each)

    def _run(self, name: str, *inputs: Any) -> Any:
        with tf.device(_HOST):
            return self._operations.run(name, *inputs)

    def info(self) -> tf.Tensor:
        """What is known of each table.

        Returns:
            [tables, 12] int64: size, capacity, physical rows, the statistics,
            and how many commits are not published.
        """
        return self._run("info")

    def look_up(
        self, keys: tf.Tensor, table_of: tf.Tensor | None = None
    ) -> Found:
        """Finds the rows of keys, to be read and checked.

        Args:
            keys: [n] int64.
            table_of: [n] int32, the table of each; None: there is one.
        """
        rows, versions = self._run("find", keys, _given(table_of))
        return Found(rows, table_of, versions)

    def check(self, found: Found) -> tuple[tf.Tensor, tf.Tensor]:
        """Finds out which rows may have been read as those of other keys.

        Args:
            found: what `look_up` returned.

        Returns:
            The rows, `ABSENT` in the place of those that were given to other
            keys since, or reserved by another step; and the number of these, a
            scalar int64.
        """
        rows, table_of, versions = found
        current, changed = self._run("check", rows, _given(table_of), versions)
        return current, changed

    def check_vectors(self, found: Found, vectors: tf.Tensor) -> tf.Tensor:
        """Clears vectors that may be other keys'.

        Args:
            found: the keys' rows.
            vectors: [n, dim], which have been read from there since.

        Returns:
            [n, dim]: zeros where a row was given to another key meanwhile.
        """
        with tf.control_dependencies(graphs.here([vectors])):
            rows, changed = self.check(found)
        return tf.cond(
            changed > 0,
            lambda: tf.where(
                tf.equal(rows, found.rows)[:, None],
                vectors,
                tf.zeros_like(vectors),
            ),
            lambda: vectors,
        )

    def publish(self, versions: tf.Tensor) -> None:
        """Lets a commit's new keys be found: their rows are written.

        Args:
            versions: the commit's.
        """
        self._run("publish", versions)

    def reserve(
        self,
        keys: tf.Tensor,
        counts: tf.Tensor | None,
        step: tf.Tensor,
        table_of: tf.Tensor | None = None,
    ) -> GivenRows:
        """Says what `commit` would do; nobody can see a change.

        Args:
            keys: [n] int64, not necessarily unique.
            counts: [n] int64, how often each entry's key occurs; an entry of 0
                does not count. None: once.
            step: scalar int64, the step's number.
            table_of: [n] int32, the table of each; None: there is one.

        Returns:
            The rows. If no commit is between two calls, the second has other
            free rows than the first, if there are enough.
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
        """Counts a step's keys, and gives rows to those that are admitted.

        Args:
            keys: [n] int64, not necessarily unique.
            counts: [n] int64, how often each entry's key occurs; an entry of 0
                does not count. None: once.
            rows: [n] int64, those reserved; others only take longer.
            step: scalar int64, the step's number.
            table_of: [n] int32, the table of each; None: there is one.

        Returns:
            What it did.
        """
        found = self._run(
            "commit", keys, _given(table_of), _or_none(counts), rows, step
        )
        return GivenRows(*found)


class KeyTable(KeyTables):
    """The keys of one table's rows on one shard.

    No strategy mirrors it.

    Args:
        rules: when keys get and lose rows.
    """

    def __init__(self, rules: KeyRules) -> None:
        self.rules = rules
        self.operations: _KernelOperations | NumpyOperations
        with tf.init_scope(), tf.device(_HOST):
            module = None
            if tf.executing_eagerly():
                module = kernels.operations(_HOST)
            if module:
                self.operations = _KernelOperations.of_table(module, rules)
            else:
                self.operations = NumpyOperations.of_table(rules)
        super().__init__([self])

    def size(self) -> tf.Tensor:
        """The number of keys that have rows, a scalar int64."""
        return self.info()[0, 0]

    def capacity(self) -> tf.Tensor:
        """How many keys can have rows as yet, a scalar int64."""
        return self.info()[0, 1]

    def physical(self) -> tf.Tensor:
        """How many rows variables must have, a scalar int64; it never falls."""
        return self.info()[0, 2]

    def find(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the rows of keys, [n] int64; `ABSENT` for those without."""
        return self.look_up(keys).rows

    def live(self) -> Live:
        """The keys that have rows, of one moment."""
        return Live(*(x.numpy() for x in self._run("export", False)))

    def candidates(self) -> np.ndarray:
        """The keys without rows that admission remembers, of one moment.

        Returns:
            [c, 3] int64, in any order: a key, how often it was seen, and the
            step that saw it last.
        """
        keys, _, *seen = self._run("export", True)
        return np.stack([keys, *seen], 1)

    def replace(
        self,
        live_keys: np.ndarray,
        frequency: np.ndarray,
        last_used: np.ndarray,
        candidates: np.ndarray,
    ) -> tuple[np.ndarray, tf.Tensor]:
        """Forgets all keys, and gives rows to others.

        The capacity doubles, up to its bound, until they fit.

        Args:
            live_keys: [n] int64, unique, as many as may have rows at most.
            frequency: [n] int64, how often each was used.
            last_used: [n] int64, the step of its last use.
            candidates: the keys without rows to remember, unique, as
                `candidates` returns them. Those that are live are left out,
                then those seen longest ago if they are too many, and all if no
                threshold asks for them.

        Returns:
            Their rows, [n] int64: `FIRST_ROW` and those that follow; and the
            version to publish.
        """
        given = [live_keys, frequency, last_used, *candidates.T]
        version = self._run(
            "replace", *(np.asarray(value, np.int64) for value in given)
        )
        return FIRST_ROW + np.arange(len(live_keys)), version

    def remove(self, keys: np.ndarray, evicted: bool = False) -> np.ndarray:
        """Forgets keys, those that have rows and those that have none.

        Args:
            keys: [n] int64.
            evicted: whether those that have rows count as evicted.

        Returns:
            The rows that they had, [n] int64; `ABSENT` if none.
        """
        keys = np.asarray(keys, np.int64)
        return self._run("remove", keys, evicted).numpy()

    def statistics(self) -> np.ndarray:
        """The numbers of keys in the last commit that did not fail, and in all.

        Returns:
            [8] int64: of the last commit the keys that were admitted and
            evicted, and those that got no row, then the occurrences of keys
            that had rows before; the same of all commits together.
        """
        return self.info().numpy()[0, 3:11]

    def moment(self) -> tuple[int, ...]:
        """Numbers that differ once keys have got or lost rows.

        It waits, up to a second, for rows that are being written for new keys.
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
    """The compiled operations on tables' handles."""

    def __init__(self, module: Any, handles: Sequence[tf.Tensor]) -> None:
        self._module = module
        self._handles = [*handles]

    @classmethod
    def of_table(cls, module: Any, rules: KeyRules) -> _KernelOperations:
        """Makes a table."""
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
            evicts=rules.evicts,
        )
        return cls(module, [handle])

    @classmethod
    def together(cls, each: Sequence[_KernelOperations]) -> _KernelOperations:
        """The operations on several tables at once."""
        return cls(each[0]._module, [h for e in each for h in e._handles])

    def run(self, name: str, *inputs: Any) -> Any:
        """Runs the operation of this name."""
        operation = getattr(self._module, f"tfrs_embed_key_tables_{name}")
        return operation(self._handles, *inputs)
