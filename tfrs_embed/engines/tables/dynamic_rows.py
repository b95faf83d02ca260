"""A shard's rows of a table whose keys come and go.

A training step's lookup plans: it finds the rows of the keys, and for keys that
the step would admit it writes their initial values into rows that no key has.
Nothing of that can be observed, so a step that fails, or that a loss scale
skips, has changed nothing. The update commits: it counts the step's keys, gives
rows to some and takes them from others.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed import graphs, key_values
from tfrs_embed.configs import TableSpec
from tfrs_embed.dynamic_keys import (
    CANDIDATES_PER_ROW,
    FrequencyAdmission,
    KeysOfShards,
    ProbabilisticAdmission,
    TimeToLive,
)
from tfrs_embed.engines.tables.key_table import (
    ABSENT,
    FIRST_ROW,
    TRASH,
    Candidates,
    Commit,
    Found,
    KeyRules,
    KeyTable,
    Plan,
)
from tfrs_embed.ops.checks import Checks, Consensus, message
from tfrs_embed.ops.update import PARAMETERS, scatter_update
from tfrs_embed.optimizers.rules import Slot

# Rows beside those that keys have, for planned ones of a full table: at least
# one in so many, and for small tables as many as there are, up to a limit.
_SPARE_PART = 32
_MOST_SPARE_OF_SMALL = 1024
# Where no key is evicted, a shard has so many standard deviations more rows
# than keys that fall on it on average.
_DEVIATIONS = 6
# No table grows beyond what an index of rows can count.
_UNLIMITED = 2**40


def key_rules(table: TableSpec, world: int) -> KeyRules:
    """The rules by which a shard's keys come and go.

    Args:
        table: the table, one with keys.
        world: the number of shards.
    """
    keys = table.keys
    assert keys is not None
    evicts = keys.when_full in ("evict", "grow") and keys.evicts_in_steps
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
    admission, eviction = keys.admission, keys.eviction
    policy = "none"
    if isinstance(eviction, TimeToLive):
        policy = "ttl"
    elif isinstance(eviction, str):
        policy = eviction
    return KeyRules(
        capacity=capacity,
        max_capacity=most,
        candidates=-(-candidates // world),
        threshold=(
            admission.threshold
            if isinstance(admission, FrequencyAdmission)
            else 0
        ),
        probability=(
            admission.probability
            if isinstance(admission, ProbabilisticAdmission)
            else 1.0
        ),
        seed=key_values.seed_of(table),
        policy=policy,
        ttl=eviction.steps if isinstance(eviction, TimeToLive) else 0,
        evicts=evicts,
    )


def _rows_of_shard(rows: int, world: int, exact: bool) -> int:
    """How many keys a shard has room for.

    Keys fall on shards by chance. A shard that evicts, or whose rows are
    declared, has its part of the rows. Another has more, so that as many keys
    as rows find room.

    Args:
        rows: the table's rows.
        world: the number of shards.
        exact: whether it has its part.
    """
    share = -(-rows // world)
    if exact or world == 1:
        return share
    return min(rows, share + math.ceil(_DEVIATIONS * math.sqrt(share)))


def rows_at_first(table: TableSpec, world: int) -> int:
    """The rows that a shard's variables are made with."""
    capacity = key_rules(table, world).capacity
    spare = max(capacity // _SPARE_PART, min(capacity, _MOST_SPARE_OF_SMALL))
    return FIRST_ROW + capacity + spare


def initial_rows_of(table: TableSpec) -> key_values.Maker:
    """What makes the initial rows of a table's keys, traced once.

    Args:
        table: the table.

    Raises:
        ValueError: its initializer's rows can't be made one by one.
    """
    return graphs.TracedOnce(
        key_values.maker(table), tf.TensorSpec([None], tf.int64)
    )


class DynamicRows:
    """A shard's keys of one table, and the rows they have.

    Args:
        owner: whose they are, for errors.
        table: the table, one with keys.
        world: the number of shards.
        variables: the shard's parameters and slots by name; see
            `rows_at_first`. Their rows are all zero, or the slots' initial
            value.
        slots: the slots, by name.
        device: where the variables are.
        make_rows: makes keys' initial rows; see `initial_rows_of`.
    """

    def __init__(
        self,
        owner: str,
        table: TableSpec,
        world: int,
        variables: Mapping[str, tf.Variable],
        slots: Mapping[str, Slot],
        device: str | None,
        make_rows: key_values.Maker,
    ) -> None:
        self._owner = owner
        self._table = table
        self._world = world
        self._variables = dict(variables)
        self._slots = {PARAMETERS: Slot(0.0), **slots}
        self._device = device
        self._make_rows = make_rows
        self.rules = key_rules(table, world)
        # Where nothing makes room for planned rows, there are none to make.
        self._may_grow = (
            self.rules.policy != "none"
            or self.rules.max_capacity > self.rules.capacity
        )
        self.key_table = KeyTable(self.rules)

    #: The first row that a key can have.
    FIRST_ROW = FIRST_ROW

    @property
    def variables(self) -> dict[str, tf.Variable]:
        """The shard's parameters and slots, by name."""
        return self._variables

    @property
    def resource(self) -> Any:
        """What TensorFlow tracks: the rows, as `Column`s save the keys."""
        return self._variables[PARAMETERS]

    def size(self) -> tf.Tensor:
        """The number of keys that have rows, a scalar int64."""
        return self.key_table.size()

    def capacity(self) -> tf.Tensor:
        """The number of keys that there is room for, a scalar int64."""
        return self.key_table.capacity()

    def find(self, keys: tf.Tensor) -> tf.Tensor:
        """Finds the rows of keys.

        Args:
            keys: [n] int64.

        Returns:
            [n] int64; of a key without one a row of zeros.
        """
        return self.key_table.find(keys)

    def look_up(self, keys: tf.Tensor) -> Found:
        """See `KeyTable.look_up`."""
        return self.key_table.look_up(keys)

    def check_vectors(self, found: Found, vectors: tf.Tensor) -> tf.Tensor:
        """Clears vectors that may be other keys'.

        Args:
            found: the keys' rows, from `look_up` or a plan.
            vectors: [n, dim], which have been read from there since.

        Returns:
            [n, dim]: zeros where a row was given to another key meanwhile.
        """
        with tf.control_dependencies(graphs.here([vectors])):
            rows, changed = self.key_table.check(*found)
        return tf.cond(
            changed > 0,
            lambda: tf.where(
                tf.equal(rows, found.rows)[:, None],
                vectors,
                tf.zeros_like(vectors),
            ),
            lambda: vectors,
        )

    def read(self, found: Found) -> tf.Tensor:
        """Reads keys' vectors, [n, dim]; see `check_vectors`."""
        with tf.device(self._device):
            vectors = tf.gather(self._variables[PARAMETERS], found.rows)
            return self.check_vectors(found, vectors)

    def trained(self, rows: tf.Tensor) -> tf.Tensor:
        """Which of the rows that `commit` returned keys have: [n] bool."""
        return tf.not_equal(rows, TRASH)

    def no_room(
        self, keys: tf.Tensor, counts: tf.Tensor | None, lacking: tf.Tensor
    ) -> tf.Tensor:
        """Says that a step's keys lack rows: a scalar string."""
        absent = tf.equal(self.key_table.find(keys), ABSENT)
        if counts is not None:
            absent &= counts > 0
        key = tf.reduce_sum(tf.boolean_mask(keys, absent)[:1])
        dtype = self._table.keys.dtype  # type: ignore[union-attr]
        if dtype == tf.uint64:
            key = tf.bitcast(key, tf.uint64)
        what = "the fingerprint of a key" if dtype == tf.string else "a key"
        more = "More rows make"
        if isinstance(self._table.keys, KeysOfShards):
            more = f"A larger {KeysOfShards.ROWS} makes"
        return message(
            f"{self._owner}, table '{self._table.name}': no room for the keys "
            "of this step: a shard has rows for ",
            self.capacity(),
            " keys, and holds ",
            self.size(),
            ". It needs ",
            lacking,
            " rows more than it can make room for; ",
            key,
            f" is {what} without one.",
            f" Other shards may have free rows. {more} room on all."
            if self._world > 1
            else f" {more} room.",
        )

    def lost_room(self, lacking: tf.Tensor) -> tf.Tensor:
        """Says that another step has taken rows: a scalar string."""
        return tf.strings.join(
            [
                f"{self._owner}, table '{self._table.name}': another step has "
                "given rows to other keys since this one looked its keys up. "
                "It lacks ",
                tf.strings.as_string(lacking),
                " rows.",
            ]
        )

    def make_initial(self, keys: tf.Tensor) -> tf.Tensor:
        """Makes keys' initial values: keys [n] int64, [n, dim] float32."""
        return self._make_rows(keys)

    def write_initial(self, rows: tf.Tensor, initial: tf.Tensor) -> None:
        """Writes initial values to rows, and leaves the slots alone."""
        self._write(PARAMETERS, rows, initial)

    def reset(self, rows: tf.Tensor, initial: tf.Tensor) -> None:
        """Gives rows initial values, and their slots theirs."""
        self.write_initial(rows, initial)
        for name, slot in self._slots.items():
            if name != PARAMETERS:
                shape = [tf.size(rows), *slot.row(self._table.dim)]
                self._write(name, rows, tf.fill(shape, slot.initial))

    def _write(self, name: str, rows: tf.Tensor, values: tf.Tensor) -> None:
        with tf.device(self._device):
            scatter_update(self._variables[name], rows, values)

    def no_rows(self) -> tf.Tensor:
        """The initial values of no keys, [0, dim] float32."""
        return tf.zeros([0, self._table.dim])

    def ensure_rows(self, rows: tf.Tensor) -> None:
        """Gives the variables as many rows at least; a scalar int64."""
        if self._may_grow:
            with tf.device(self._device):
                _grow(
                    rows,
                    [self._variables[name].handle for name in self._slots],
                    tuple(slot.initial for slot in self._slots.values()),
                    tuple(s.row(self._table.dim) for s in self._slots.values()),
                )

    # Eagerly, of what users and checkpoints read and write.

    def keys(self) -> np.ndarray:
        """The keys that have rows, [size] int64, by row."""
        live = self.key_table.live()
        return live.keys[np.argsort(live.rows)]

    def rows(self) -> np.ndarray:
        """Their rows, [size] int64, ascending."""
        return np.sort(self.key_table.live().rows)

    def counters(self, name: str) -> np.ndarray:
        """Their `frequency` or `last_used`, [size] int64, by row."""
        live = self.key_table.live()
        return getattr(live, name)[np.argsort(live.rows)]

    def candidates(self) -> np.ndarray:
        """The candidates, [c, 3] int64: key, occurrences, last seen in step."""
        return np.stack(self.key_table.candidates(), 1)

    def replace(
        self,
        keys: np.ndarray,
        frequency: np.ndarray | None = None,
        last_used: np.ndarray | None = None,
        candidates: np.ndarray | None = None,
    ) -> None:
        """Forgets all keys, and gives rows of initial values to others.

        Args:
            keys: [n] int64, unique.
            frequency: [n] int64; None: zeros.
            last_used: [n] int64; None: zeros.
            candidates: as `candidates` returns them; None: none.

        Raises:
            ValueError: there is no room for them.
        """
        zeros = np.zeros(len(keys), np.int64)
        rows, version = self.key_table.replace(
            keys,
            zeros if frequency is None else frequency,
            zeros if last_used is None else last_used,
            None if candidates is None else Candidates(*candidates.T),
        )
        self.ensure_rows(self.key_table.physical())
        blocks = max(1, (1 << 20) // self._table.dim)
        for start in range(0, len(keys), blocks):
            part = slice(start, start + blocks)
            self.reset(
                tf.constant(rows[part], tf.int64),
                self.make_initial(tf.constant(keys[part], tf.int64)),
            )
        self.key_table.publish(version)

    def set_counters(self, name: str, values: np.ndarray) -> None:
        """Sets the keys' `frequency` or `last_used`, [size] int64, by row."""
        counted = {n: self.counters(n) for n in ("frequency", "last_used")}
        counted[name] = values
        self._put(self.keys(), candidates=self.candidates(), **counted)

    def set_candidates(self, candidates: np.ndarray) -> None:
        """Sets the candidates, as `candidates` returns them."""
        counted = {n: self.counters(n) for n in ("frequency", "last_used")}
        self._put(self.keys(), candidates=candidates, **counted)

    def _put(
        self,
        keys: np.ndarray,
        frequency: np.ndarray,
        last_used: np.ndarray,
        candidates: np.ndarray,
    ) -> None:
        """Replaces the keys by themselves, by row, with other counters."""
        before = self.rows()
        after, version = self.key_table.replace(
            keys, frequency, last_used, Candidates(*candidates.T)
        )
        if not np.array_equal(before, after):
            for name in self._slots:
                with tf.device(self._device):
                    values = tf.gather(self._variables[name], before)
                self._write(name, tf.constant(after, tf.int64), values)
        self.key_table.publish(version)

    def remove(self, keys: np.ndarray, evicted: bool = False) -> int:
        """Takes the rows of keys; returns how many had one.

        Args:
            keys: [n] int64, unique.
            evicted: whether they count as evicted.
        """
        return int(np.sum(self.key_table.remove(keys, evicted) != ABSENT))


# A function, as it is called in several branches, and of handles: what holds
# variables would keep them alive in graphs that TensorFlow keeps.
@tf.function(autograph=False)
def _grow(
    rows: tf.Tensor,
    handles: list[tf.Tensor],
    initial: tuple[float, ...],
    row_shapes: tuple[tuple[int, ...], ...],
) -> None:
    """Gives variables [n, ...] as many rows at least, and some to spare."""
    shape = tf.raw_ops.VariableShape(input=handles[0])
    here = tf.cast(shape[0], tf.int64)

    def grow() -> tf.Tensor:
        more = rows - here + rows // _SPARE_PART
        for handle, value, row in zip(
            handles, initial, row_shapes, strict=True
        ):
            before = tf.raw_ops.ReadVariableOp(
                resource=handle, dtype=tf.float32
            )
            added = tf.fill(tf.stack([more, *row]), tf.constant(value))
            tf.raw_ops.AssignVariableOp(
                resource=handle, value=tf.concat([before, added], 0)
            )
        return tf.constant(True)

    tf.cond(rows > here, grow, lambda: tf.constant(False))


class Request(NamedTuple):
    """A training step's keys of a table, on one shard.

    Attributes:
        of: the table's rows there.
        keys: [n] int64.
        counts: [n] int64, how often each occurred, 0 for padding; None: once.
        step: scalar int64, the step's number: 1 for the first.
    """

    of: DynamicRows
    keys: tf.Tensor
    counts: tf.Tensor | None
    step: tf.Tensor


class Planned(NamedTuple):
    """What a step's plan found of a table's keys.

    Attributes:
        rows: [n] int64, the keys' rows; of a key that this step admits a row
            of its initial values, of another without a row one of zeros.
        new_keys: [m] int64, the keys that this step admits.
        initial: [m, dim] float32, their initial values.
        version: scalar int64; see `KeyTable.check`.
    """

    rows: tf.Tensor
    new_keys: tf.Tensor
    initial: tf.Tensor
    version: tf.Tensor


def plan(
    requests: Sequence[Request], consensus: Consensus | None = None
) -> list[Planned]:
    """Finds the rows of a training step's keys, and changes nothing.

    Args:
        requests: the keys, of several tables.
        consensus: with whom to decide whether there is room.

    Returns:
        Each table's rows.

    Raises:
        tf.errors.InvalidArgumentError: they need more rows than there are.
    """
    checks = Checks(consensus)
    plans = []
    for of, keys, counts, step in requests:
        planned = of.key_table.plan(keys, counts, step)
        checks.require(
            tf.equal(planned.lacking, 0),
            functools.partial(of.no_room, keys, counts, planned.lacking),
        )
        plans.append(planned)
    guarded = iter(
        checks.guard(
            [t for p in plans for t in (p.rows, p.new_keys, p.new_rows)]
        )
    )
    plans = [
        p._replace(
            rows=next(guarded), new_keys=next(guarded), new_rows=next(guarded)
        )
        for p in plans
    ]

    def write() -> list[tf.Tensor]:
        made = []
        for request, planned in zip(requests, plans, strict=True):
            initial = request.of.make_initial(planned.new_keys)
            request.of.ensure_rows(planned.physical)
            request.of.write_initial(planned.new_rows, initial)
            made.append(initial)
        return made

    def write_none() -> list[tf.Tensor]:
        return [request.of.no_rows() for request in requests]

    initial, rows = _if_any_new(plans, write, write_none)
    return [
        Planned(found, p.new_keys, made, p.version)
        for found, p, made in zip(rows, plans, initial, strict=True)
    ]


def commit(
    requests: Sequence[Request], planned: Sequence[Planned]
) -> list[tf.Tensor]:
    """Counts a step's keys, and gives rows to those that it admits.

    Args:
        requests: what `plan` was given.
        planned: what it returned.

    Returns:
        Each table's rows to train, [n] int64; those of keys without one are a
        row that nobody reads.

    Raises:
        tf.errors.InvalidArgumentError: another step has taken the rows that a
            table's keys need. That table has not changed.
    """
    settled = []
    for (of, keys, counts, step), found in zip(requests, planned, strict=True):
        each = of.key_table.commit(keys, counts, found.rows, step)
        # Of strings, which takes no branch.
        room = tf.debugging.Assert(
            tf.equal(each.lacking, 0), [of.lost_room(each.lacking)]
        )
        with tf.control_dependencies([room] if room is not None else []):
            settled.append(each._replace(rows=tf.identity(each.rows)))

    def reset() -> list[tf.Tensor]:
        for request, each, found in zip(
            requests, settled, planned, strict=True
        ):
            request.of.ensure_rows(each.physical)
            request.of.reset(
                each.new_rows, _initial_of(request.of, each.new_keys, found)
            )
        return []

    _, rows = _if_any_new(settled, reset, list)
    with tf.control_dependencies(graphs.here(rows)):
        for request, each in zip(requests, settled, strict=True):
            request.of.key_table.publish(each.version)
    return rows


def _initial_of(
    of: DynamicRows, new_keys: tf.Tensor, planned: Planned
) -> tf.Tensor:
    """The initial values of a commit's new keys: [m, dim] float32.

    Those that the plan made, unless another step came between and has admitted
    some of its keys, or made others forgotten.
    """
    same = tf.equal(tf.size(new_keys), tf.size(planned.new_keys))
    size = tf.where(same, tf.size(new_keys), 0)
    same &= tf.reduce_all(tf.equal(new_keys[:size], planned.new_keys[:size]))
    return tf.cond(
        same, lambda: planned.initial, lambda: of.make_initial(new_keys)
    )


def _if_any_new(
    changes: Sequence[Plan | Commit],
    work: Callable[[], list[tf.Tensor]],
    otherwise: Callable[[], list[tf.Tensor]],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Does some work if changes have new keys.

    Args:
        changes: the changes.
        work: what to do; returns tensors.
        otherwise: returns as many, of the same dtypes.

    Returns:
        The tensors, and the changes' rows, which are there once it is done.
    """
    if not changes:
        return [], []

    def do() -> list[tf.Tensor]:
        # The last says that the work is done, whatever it returns.
        return [*work(), tf.constant(True)]

    new = tf.add_n([tf.size(c.new_keys) for c in changes])
    *made, done = tf.cond(
        new > 0, do, lambda: [*otherwise(), tf.constant(False)]
    )
    with tf.control_dependencies([done]):
        return made, [tf.identity(c.rows) for c in changes]
