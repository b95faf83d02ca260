"""A training step's rows for keys: reserved in the lookup, then committed.

`reserve` finds the rows of a step's keys. For keys that the step would admit,
it writes initial values into rows that no key has. Readers can't see this, so a
step that fails, or that loss scaling skips, changes nothing. `commit`, in the
update, counts the keys, and admits and evicts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import graphs
from tfrs_embed.ops.checks import Checks, Consensus
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.storage.key_rules import ABSENT
from tfrs_embed.storage.key_table import SPILL_KEYS, KeyRows
from tfrs_embed.storage.keyed_shard import KeyedShard, KeyedShards


class Request(NamedTuple):
    """A training step's keys of tables of one width, on one shard.

    Attributes:
        tables: the tables' rows there.
        keys: [n] int64.
        table_of: [n] int32, each key's table; None: there is one table.
        counts: [n] int64, occurrences, 0 for padding; None: 1 each.
        step: the step's number, a scalar int64; 1 for the first.
    """

    tables: KeyedShards
    keys: tf.Tensor
    table_of: tf.Tensor | None
    counts: tf.Tensor | None
    step: tf.Tensor


class Reservation(NamedTuple):
    """The rows that a step has reserved for its keys, on one shard.

    Attributes:
        request: the keys.
        rows: [n] int64, the keys' rows; for a key that is admitted a row with
            its initial values, for another key without a row a row of zeros.
        new_keys: [m] int64, the keys to admit, table after table.
        new_sizes: [tables] int64, how many new keys each table has.
        initial: [m, dim] float32, the new keys' initial values.
    """

    request: Request
    rows: tf.Tensor
    new_keys: tf.Tensor
    new_sizes: tf.Tensor
    initial: tf.Tensor


def reserve(
    requests: Sequence[Request], consensus: Consensus | None = None
) -> list[Reservation]:
    """Finds the rows of a training step's keys; changes nothing visible.

    The requests have the keys of all tables of the step. `consensus` decides
    with other replicas whether there is room.

    Raises:
        tf.errors.InvalidArgumentError: the keys need more rows than there are.
    """
    checks = Checks(consensus)
    given = []
    if not requests:
        return []
    host = requests[0].tables.key_table.host
    with tf.device(host):
        for request in requests:
            tables, keys, table_of, counts, step = request
            found = tables.key_table.reserve(keys, counts, step, table_of)
            checks.require(
                tf.reduce_all(tf.equal(found.lacking, 0)),
                functools.partial(_no_room, request, found.lacking),
            )
            given.append(found)
        # The first three fields: rows, new keys and new rows.
        guarded = checks.guard([t for g in given for t in g[:3]])
    given = [
        KeyRows._make([*guarded[3 * i : 3 * i + 3], *g[3:]])
        for i, g in enumerate(given)
    ]

    def write() -> list[tf.Tensor]:
        made = []
        for request, new in zip(requests, given, strict=True):
            initial = request.tables.make_initial(new.new_keys, new.new_sizes)
            for shard, keys, rows, values in _by_table(
                request.tables, new, initial
            ):
                shard.write(PARAMETERS, rows, values)
                shard.fetch(keys, rows, parameters_only=True)
            made.append(initial)
        return made

    def write_none() -> list[tf.Tensor]:
        return [tf.zeros([0, request.tables.dim]) for request in requests]

    initial, rows = _if_any_new(host, given, write, write_none)
    return [
        Reservation(request, found, g.new_keys, g.new_sizes, made)
        for request, found, g, made in zip(
            requests, rows, given, initial, strict=True
        )
    ]


def commit(reservations: Sequence[Reservation]) -> list[tf.Tensor]:
    """Counts a step's keys, and gives rows to those that are admitted.

    Returns, for each reservation, the rows to train, [n] int64. For keys
    without one it is a row that nobody reads.

    Raises:
        tf.errors.InvalidArgumentError: another step has taken the rows that a
            table's keys need. That table has not changed.
    """
    if not reservations:
        return []
    given = [
        tables.key_table.commit(keys, counts, reserved, step, table_of)
        for (tables, keys, table_of, counts, step), reserved, *_ in reservations
    ]
    owners = [s.owner for r in reservations for s in r.request.tables.shards]
    # All of it is on the host already.
    host = reservations[0].request.tables.key_table.host
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

    def reset() -> list[tf.Tensor]:
        made = _initial_of(reservations, given)
        for reservation, new, initial in zip(
            reservations, given, made, strict=True
        ):
            tables = reservation.request.tables
            for shard, keys, rows, values in _by_table(tables, new, initial):
                shard.reset(rows, values)
                shard.fetch(keys, rows)
        return []

    _, rows = _if_any_new(host, given, reset, list)
    with tf.control_dependencies(graphs.capture(rows)):
        for reservation, each in zip(reservations, given, strict=True):
            reservation.request.tables.key_table.publish(each.versions)
    return rows


def _no_room(request: Request, lacking: tf.Tensor) -> tf.Tensor:
    """Returns an error's text: a step's keys lack rows; a scalar string.

    `lacking`, [tables] int64, says how many rows each table lacks.
    """
    tables, keys, table_of, counts, _ = request
    owners: list[tuple[str, Any]] = [
        (shard.owner, shard.table.keys) for shard in tables.shards
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

    absent = tf.equal(tables.key_table.lookup(keys, table_of).rows, ABSENT)
    if counts is not None:
        absent &= counts > 0
    if table_of is None:
        table_of = tf.zeros([0], tf.int32)
    inputs = [tables.key_table.info(), lacking, absent, table_of, keys]
    with tf.device("CPU:0"):
        made = tf.numpy_function(text, inputs, tf.string, stateful=False)
        return tf.ensure_shape(made, [])


def _by_table(
    tables: KeyedShards, new: KeyRows, initial: tf.Tensor
) -> Iterator[tuple[KeyedShard, tf.Tensor, tf.Tensor, tf.Tensor]]:
    """Makes room, and yields each table's shard, new keys, rows and values."""
    number = len(tables.shards)
    # Where all of it is.
    with tf.device(tables.key_table.host):
        physical = tf.unstack(new.physical, number)
        parts = [
            _split(values, new.new_sizes, number)
            for values in (new.new_keys, new.new_rows, initial)
        ]
    for shard, rows in zip(tables.shards, physical, strict=True):
        shard.make_room(rows)
    return zip(tables.shards, *parts, strict=True)


def _split(values: tf.Tensor, sizes: tf.Tensor, number: int) -> list[tf.Tensor]:
    if number == 1:
        return [values]
    split: list[tf.Tensor] = tf.split(values, sizes, num=number)
    return split


def _initial_of(
    reservations: Sequence[Reservation], given: Sequence[KeyRows]
) -> list[tf.Tensor]:
    """Returns the initial values of each request's new keys, [m, dim].

    These are the reserved ones, unless another step has changed which keys are
    new.
    """
    with tf.device(reservations[0].request.tables.key_table.host):
        here, expected = (
            tf.concat([t for e in each for t in (e.new_sizes, e.new_keys)], 0)
            for each in (given, reservations)
        )
        same = tf.equal(tf.size(here), tf.size(expected))
        size = tf.minimum(tf.size(here), tf.size(expected))
        same &= tf.reduce_all(tf.equal(here[:size], expected[:size]))
    made: list[tf.Tensor] = tf.cond(
        same,
        lambda: [tf.identity(r.initial) for r in reservations],
        lambda: [
            r.request.tables.make_initial(each.new_keys, each.new_sizes)
            for r, each in zip(reservations, given, strict=True)
        ],
    )
    return made


def _if_any_new(
    host: str,
    given: Sequence[KeyRows],
    work: Callable[[], list[tf.Tensor]],
    otherwise: Callable[[], list[tf.Tensor]],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Runs `work` if there are new keys, else `otherwise`, on the keys' host.

    Both return equally many tensors of the same dtypes. Returns these, and the
    keys' rows, which exist after `work` has run.
    """

    def do() -> list[tf.Tensor]:
        # The last tensor says that the work is done.
        return [*work(), tf.constant(True)]

    with tf.device(host):
        new = tf.add_n([tf.size(g.new_keys) for g in given])
        *made, done = tf.cond(
            new > 0, do, lambda: [*otherwise(), tf.constant(False)]
        )
        with tf.control_dependencies([done]):
            return made, [tf.identity(g.rows) for g in given]
