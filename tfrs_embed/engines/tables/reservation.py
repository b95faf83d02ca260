"""Rows for the keys of a training step: reserved, then given.

A training step's lookup reserves: it finds the rows of the keys, and for keys
that the step would admit it writes their initial values into rows that no key
has. Nothing of that can be observed, so a step that fails, or that a loss scale
skips, has changed nothing. The update commits: it counts the step's keys, gives
rows to some and takes them from others.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import tensorflow as tf

from tfrs_embed import graphs
from tfrs_embed.engines.tables.key_table import GivenRows
from tfrs_embed.engines.tables.keyed_shard import KeyedShard
from tfrs_embed.ops.checks import Checks, Consensus
from tfrs_embed.ops.update import PARAMETERS


class Request(NamedTuple):
    """A training step's keys of a table, on one shard.

    Attributes:
        shard: the table's rows there.
        keys: [n] int64.
        counts: [n] int64, how often each occurred, 0 for padding; None: once.
        step: scalar int64, the step's number: 1 for the first.
    """

    shard: KeyedShard
    keys: tf.Tensor
    counts: tf.Tensor | None
    step: tf.Tensor


class Reservation(NamedTuple):
    """The rows that a step has reserved for a table's keys, on one shard.

    Attributes:
        request: the keys.
        rows: [n] int64, the keys' rows; of a key that this step admits a row
            of its initial values, of another without a row one of zeros.
        new_keys: [m] int64, the keys that this step admits.
        initial: [m, dim] float32, their initial values.
    """

    request: Request
    rows: tf.Tensor
    new_keys: tf.Tensor
    initial: tf.Tensor


def reserve(
    requests: Sequence[Request], consensus: Consensus | None = None
) -> list[Reservation]:
    """Finds the rows of a training step's keys; nobody can see a change.

    Args:
        requests: the keys, of all tables of the step.
        consensus: with whom to decide whether there is room.

    Returns:
        Each table's rows.

    Raises:
        tf.errors.InvalidArgumentError: they need more rows than there are.
    """
    checks = Checks(consensus)
    given = []
    for shard, keys, counts, step in requests:
        found = shard.key_table.reserve(keys, counts, step)
        checks.require(
            tf.equal(found.lacking, 0),
            functools.partial(shard.no_room, keys, counts, found.lacking),
        )
        given.append(found)
    # Rows, new keys and new rows of each.
    guarded = checks.guard([t for g in given for t in g[:3]])
    given = [
        GivenRows._make([*guarded[3 * i : 3 * i + 3], *g[3:]])
        for i, g in enumerate(given)
    ]

    def write() -> list[tf.Tensor]:
        made = []
        for request, new in zip(requests, given, strict=True):
            initial = request.shard.make_initial(new.new_keys)
            request.shard.ensure_rows(new.physical)
            request.shard.write(PARAMETERS, new.new_rows, initial)
            made.append(initial)
        return made

    def write_none() -> list[tf.Tensor]:
        return [tf.zeros([0, request.shard.dim]) for request in requests]

    initial, rows = _if_any_new(given, write, write_none)
    return [
        Reservation(request, found, g.new_keys, made)
        for request, found, g, made in zip(
            requests, rows, given, initial, strict=True
        )
    ]


def commit(reservations: Sequence[Reservation]) -> list[tf.Tensor]:
    """Counts a step's keys, and gives rows to those that it admits.

    Args:
        reservations: what `reserve` returned.

    Returns:
        Each table's rows to train, [n] int64; those of keys without one are a
        row that nobody reads.

    Raises:
        tf.errors.InvalidArgumentError: another step has taken the rows that a
            table's keys need. That table has not changed.
    """
    if not reservations:
        return []
    given = [
        shard.key_table.commit(keys, counts, reserved, step)
        for (shard, keys, counts, step), reserved, *_ in reservations
    ]
    lacking = tf.stack([each.lacking for each in given])
    worst = tf.argmax(lacking)
    text = tf.strings.join(
        [
            tf.constant([r.request.shard.owner for r in reservations])[worst],
            ": another step has given rows to other keys since this one looked "
            "its keys up. It lacks ",
            tf.strings.as_string(lacking[worst]),
            " rows.",
        ]
    )
    # Of strings, which takes no branch.
    room = tf.debugging.Assert(tf.equal(lacking[worst], 0), [text])
    with tf.control_dependencies([room] if room is not None else []):
        given = [each._replace(rows=tf.identity(each.rows)) for each in given]

    def reset() -> list[tf.Tensor]:
        made = _initial_of(reservations, [each.new_keys for each in given])
        for reservation, each, initial in zip(
            reservations, given, made, strict=True
        ):
            shard = reservation.request.shard
            shard.ensure_rows(each.physical)
            shard.reset(each.new_rows, initial)
        return []

    _, rows = _if_any_new(given, reset, list)
    with tf.control_dependencies(graphs.here(rows)):
        for reservation, each in zip(reservations, given, strict=True):
            reservation.request.shard.key_table.publish(each.version)
    return rows


def _initial_of(
    reservations: Sequence[Reservation], new_keys: Sequence[tf.Tensor]
) -> list[tf.Tensor]:
    """The initial values of each table's keys that got rows: [m, dim] float32.

    Those that were made for the lookup, unless another step came between and
    has admitted some of the keys, or made others forgotten.
    """

    def joined(keys: Sequence[tf.Tensor]) -> tf.Tensor:
        sizes = tf.stack([tf.size(each, tf.int64) for each in keys])
        return tf.concat([sizes, *keys], 0)

    here, expected = (
        joined(new_keys),
        joined([r.new_keys for r in reservations]),
    )
    same = tf.equal(tf.size(here), tf.size(expected))
    size = tf.minimum(tf.size(here), tf.size(expected))
    same &= tf.reduce_all(tf.equal(here[:size], expected[:size]))
    made: list[tf.Tensor] = tf.cond(
        same,
        lambda: [tf.identity(r.initial) for r in reservations],
        lambda: [
            r.request.shard.make_initial(keys)
            for r, keys in zip(reservations, new_keys, strict=True)
        ],
    )
    return made


def _if_any_new(
    given: Sequence[GivenRows],
    work: Callable[[], list[tf.Tensor]],
    otherwise: Callable[[], list[tf.Tensor]],
) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
    """Does some work if there are new keys.

    Args:
        given: the rows, table by table.
        work: what to do; returns tensors.
        otherwise: returns as many, of the same dtypes.

    Returns:
        The tensors, and the keys' rows, which are there once it is done.
    """
    if not given:
        return [], []

    def do() -> list[tf.Tensor]:
        # The last says that the work is done, whatever it returns.
        return [*work(), tf.constant(True)]

    new = tf.add_n([tf.size(g.new_keys) for g in given])
    *made, done = tf.cond(
        new > 0, do, lambda: [*otherwise(), tf.constant(False)]
    )
    with tf.control_dependencies([done]):
        return made, [tf.identity(g.rows) for g in given]
