"""A training step's rows for keys: reserved in the lookup, then committed.

`reserve` finds the rows of a step's keys. For keys that the step would admit,
it writes initial values into rows that no key has. Readers can't see this, so a
step that fails, or that loss scaling skips, changes nothing. `commit`, in the
update, counts the keys, and admits and evicts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import graphs
from tfrs_embed.ops.checks import Checks, Consensus
from tfrs_embed.storage import initial_key_values
from tfrs_embed.storage.key_rules import ABSENT
from tfrs_embed.storage.key_table import SPILL_KEYS, KeyRows, KeyTable
from tfrs_embed.storage.keyed_shard import KeyedShard


class StepKeys(NamedTuple):
    """Keys of tables of one width, on one shard, that one step looks up.

    Attributes:
        places: which of the ids that a store was given these are.
        table: the tables' keys.
        shards: each of these tables.
        keys: [n] int64.
        table_of: [n] int32, each key's table; None: there is one table.
        counts: [n] int64, occurrences, 0 for padding; None: 1 each.
        step: the step's number, 1 for the first, and its time in microseconds
            since 1970 if a table counts in time, [2] int64; None outside of
            training.
    """

    places: Sequence[int]
    table: KeyTable
    shards: Sequence[KeyedShard]
    keys: tf.Tensor
    table_of: tf.Tensor | None
    counts: tf.Tensor | None
    step: tf.Tensor | None

    def give(self, new: KeyRows, initial: tf.Tensor, reserved: bool) -> None:
        """Gives new keys their rows, and makes room for them.

        Slots are left as they are if the rows are `reserved` only.
        """
        number = len(self.shards)
        # Where all of it is.
        with tf.device(self.table.host):
            physical = tf.unstack(new.physical, number)
            parts = [
                tf.split(values, new.new_sizes, num=number)
                if number > 1
                else [values]
                for values in (new.new_keys, new.new_rows, initial)
            ]
        for shard, rows in zip(self.shards, physical, strict=True):
            shard.make_room(rows)
        for shard, *of_table in zip(self.shards, *parts, strict=True):
            shard.give(*of_table, self.step, parameters_only=reserved)

    def make_initial(self, new: KeyRows) -> tf.Tensor:
        """Makes new keys' first values, [m, dim], in the order of tables."""
        return initial_key_values.make_rows(
            [shard.make_first for shard in self.shards],
            new.new_keys,
            new.new_sizes,
        )


def reserve(
    step_keys: Sequence[StepKeys], consensus: Consensus | None = None
) -> list[KeyRows]:
    """Finds the rows of a training step's keys; changes nothing visible.

    The keys are those of all tables of the step. `consensus` decides with other
    replicas whether there is room. The rows of admitted keys have their initial
    values; other keys without a row have a row of zeros, or their shared row.

    Raises:
        tf.errors.InvalidArgumentError: the keys need more rows than there are.
    """
    checks = Checks(consensus)
    found: list[KeyRows] = []
    if not step_keys:
        return found
    host = step_keys[0].table.host
    with tf.device(host):
        for each in step_keys:
            rows = each.table.reserve(
                each.keys, each.counts, each.step, each.table_of
            )
            checks.require(
                tf.reduce_all(tf.equal(rows.lacking, 0)),
                functools.partial(_no_room, each, rows.lacking),
            )
            found.append(rows)
        # The first three fields: rows, new keys and new rows.
        guarded = checks.guard([t for rows in found for t in rows[:3]])
    found = [
        KeyRows._make([*guarded[3 * i : 3 * i + 3], *rows[3:]])
        for i, rows in enumerate(found)
    ]

    def write() -> list[tf.Tensor]:
        made = []
        for each, new in zip(step_keys, found, strict=True):
            made.append(each.make_initial(new))
            each.give(new, made[-1], reserved=True)
        return made

    def write_none() -> list[tf.Tensor]:
        return [tf.zeros([0, each.shards[0].table.dim]) for each in step_keys]

    made, found = _if_any_new(host, found, write, write_none)
    return [
        rows._replace(initial=initial)
        for rows, initial in zip(found, made, strict=True)
    ]


def commit(reserved: Sequence[tuple[StepKeys, KeyRows]]) -> list[tf.Tensor]:
    """Counts a step's keys, and gives rows to those that are admitted.

    Returns, for each of `reserved`, the rows to train, [n] int64. For keys
    without one it is their shared row, or a row that nobody reads.

    Raises:
        tf.errors.InvalidArgumentError: another step has taken the rows that a
            table's keys need. That table has not changed.
    """
    if not reserved:
        return []
    given = [
        each.table.commit(
            each.keys, each.counts, rows.rows, each.step, each.table_of
        )
        for each, rows in reserved
    ]
    owners = [shard.owner for each, _ in reserved for shard in each.shards]
    # All of it is on the host already.
    host = reserved[0][0].table.host
    with tf.device(host):
        lacking = tf.concat([each.lacking for each in given], 0)
        worst = tf.argmax(lacking)
        text = tf.strings.join(
            [
                tf.constant(owners)[worst],
                ": another step has given rows to other keys since this one "
                "looked its keys up. It lacks ",
                tf.strings.as_string(lacking[worst]),
                " rows.",
            ]
        )
        # The text is joined outside of a branch.
        room = tf.debugging.Assert(tf.equal(lacking[worst], 0), [text])
        with tf.control_dependencies([room] if room is not None else []):
            given = [g._replace(rows=tf.identity(g.rows)) for g in given]

    def give() -> list[tf.Tensor]:
        made = _initial_of(reserved, given)
        for (each, _), new, initial in zip(reserved, given, made, strict=True):
            each.give(new, initial, reserved=False)
        return []

    _, given = _if_any_new(host, given, give, list)
    rows = [each.rows for each in given]
    with tf.control_dependencies(graphs.capture(rows)):
        for (each, _), new in zip(reserved, given, strict=True):
            each.table.publish(new.versions)
    return rows


def _no_room(step_keys: StepKeys, lacking: tf.Tensor) -> tf.Tensor:
    """Returns an error's text: a step's keys lack rows; a scalar string.

    `lacking`, [tables] int64, says how many rows each table lacks.
    """
    _, table, shards, keys, table_of, counts, _ = step_keys
    owners: list[tuple[str, Any]] = [
        (shard.owner, shard.table.keys) for shard in shards
    ]

    def text(
        info: np.ndarray,
        lacking: np.ndarray,
        absent: np.ndarray,
        table_of: np.ndarray,
        keys: np.ndarray,
    ) -> bytes:
        worst = np.argmax(lacking)
        size, capacity = info[worst, :2]
        size -= info[worst, SPILL_KEYS]
        owner, declared = owners[worst]
        if len(table_of):
            absent &= table_of == worst
        [key] = keys[absent][:1] if absent.any() else [np.int64(0)]
        if declared.dtype == tf.uint64:
            key = key.view(np.uint64)
        is_string = declared.dtype == tf.string
        return (
            f"{owner}: no room for the keys of this step: a shard has rows "
            f"for {capacity} keys, and holds {size}. It needs "
            f"{lacking[worst]} rows more than it can make room for; {key} "
            f"is {'the fingerprint of ' * is_string}a key without one. "
            f"{declared.MORE_ROOM}"
        ).encode()

    found = table.lookup(keys, table_of, shared=False)
    absent = tf.equal(found.rows, ABSENT)
    if counts is not None:
        absent &= counts > 0
    if table_of is None:
        table_of = tf.zeros([0], tf.int32)
    inputs = [table.info(), lacking, absent, table_of, keys]
    with tf.device("CPU:0"):
        made = tf.numpy_function(text, inputs, tf.string, stateful=False)
        return tf.ensure_shape(made, [])


def _initial_of(
    reserved: Sequence[tuple[StepKeys, KeyRows]], given: Sequence[KeyRows]
) -> list[tf.Tensor]:
    """Returns the initial values of new keys of each width, [m, dim].

    These are the reserved ones, unless another step has changed which keys are
    new.
    """
    before = [rows for _, rows in reserved]
    with tf.device(reserved[0][0].table.host):
        here, expected = (
            tf.concat([t for e in each for t in (e.new_sizes, e.new_keys)], 0)
            for each in (given, before)
        )
        same = tf.equal(tf.size(here), tf.size(expected))
        size = tf.minimum(tf.size(here), tf.size(expected))
        same &= tf.reduce_all(tf.equal(here[:size], expected[:size]))
    made: list[tf.Tensor] = tf.cond(
        same,
        lambda: [tf.identity(rows.initial) for rows in before],
        lambda: [
            each.make_initial(new)
            for (each, _), new in zip(reserved, given, strict=True)
        ],
    )
    return made


def _if_any_new(
    host: str,
    found: Sequence[KeyRows],
    work: Callable[[], list[tf.Tensor]],
    otherwise: Callable[[], list[tf.Tensor]],
) -> tuple[list[tf.Tensor], list[KeyRows]]:
    """Runs `work` if there are new keys, else `otherwise`, on the keys' host.

    Both return equally many tensors of the same dtypes. Returns these, and what
    was found, with rows that exist after `work` has run.
    """

    def do() -> list[tf.Tensor]:
        # The last tensor says that the work is done.
        return [*work(), tf.constant(True)]

    with tf.device(host):
        new = tf.add_n([tf.size(each.new_keys) for each in found])
        *made, done = tf.cond(
            new > 0, do, lambda: [*otherwise(), tf.constant(False)]
        )
        with tf.control_dependencies([done]):
            return made, [
                each._replace(rows=tf.identity(each.rows)) for each in found
            ]
