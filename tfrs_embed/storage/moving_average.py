"""Moving averages of tables: target networks, averages of weights."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import blocks
from tfrs_embed.checkpoint.rows import FALLBACK, KEYS, Rows, scatter
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.storage.dynamic_table import remove_keys
from tfrs_embed.storage.table_state import TableState


def check(layer: Any, other: Any) -> None:
    """Raises a ValueError if tables can't be averages of another layer's."""
    names = [list(each.tables) for each in (layer, other)]
    if sorted(names[0]) != sorted(names[1]):
        raise ValueError(
            f"Layer '{layer.name}' has the tables {names[0]}, the other layer "
            f"{names[1]}."
        )
    for name, table in layer.tables.items():
        _check(table, other.tables[name])


def _check(mine: TableState, other: TableState) -> None:
    where = f"Table '{mine.spec.name}'"
    for table in (mine, other):
        if PARAMETERS not in table.variables:
            raise ValueError(
                f"{where} isn't made yet: call or build its layer first."
            )
    kinds = [
        (
            t.spec.dim,
            t.spec.keys and (t.spec.keys.dtype, t.spec.keys.fallback_rows),
        )
        for t in (mine, other)
    ]
    if kinds[0] != kinds[1] or (
        mine.spec.keys is None
        and mine.spec.vocabulary_size != other.spec.vocabulary_size
    ):
        raise ValueError(f"{where}: the other table has another shape or keys.")
    if mine.spec.keys is not None:
        keyed, theirs = cast(Any, mine), cast(Any, other)
        keyed.built("assign_moving_average").require_room(
            theirs.variables[KEYS].numpy()
        )
    dtype = tf.as_dtype(mine.spec.dtype)
    if dtype.size < 4:
        raise ValueError(
            f"{where}: rows of {dtype.name} would lose small changes: give the "
            "table that is the average float32."
        )


def average(mine: TableState, other: TableState, rate: float) -> None:
    """Makes rows rate * row + (1 - rate) * the other table's row."""
    name = PARAMETERS
    if mine.spec.keys is not None:
        _average_keys(cast(Any, mine), cast(Any, other), rate)
        if not mine.spec.keys.fallback_rows:
            return
        name = f"{FALLBACK}{PARAMETERS}"
    ours: Rows = mine.saved[name]
    theirs: Rows = other.saved[name]
    (spread, here), (as_there, there) = ours.local(), theirs.local()
    if spread is not None and spread == as_there:
        for variable, given in zip(here, there, strict=True):
            for start, size in blocks(variable.shape.as_list(), tf.float32):
                with tf.device(variable.device):
                    rows = tf.range(start, start + size)
                    mean = blend(
                        tf.gather(variable, rows), tf.gather(given, rows), rate
                    )
                scatter(variable, rows, mean)
    else:
        with theirs.reading(), ours.reading(), ours.writing():
            for start, size in blocks(ours.shape.as_list(), tf.float32):
                numbers = range(start, start + size)
                before, given = (
                    each.collect_rows(numbers) for each in (ours, theirs)
                )
                ours.write_rows(numbers, blend(before, given, rate))
    mine.assigned()


def blend(before: Any, given: Any, rate: float) -> tf.Tensor:
    """Returns rate * before + (1 - rate) * given, of the first's dtype."""
    given = tf.cast(given, before.dtype)
    # A copy is exact, whatever was there before.
    return before + (given - before) * (1.0 - rate) if rate else given


def _average_keys(mine: Any, other: Any, rate: float) -> None:
    """Averages the rows of keys; the table then has the other's keys.

    New keys get the other's rows.
    """
    keys, known = (each.variables[KEYS].numpy() for each in (other, mine))
    remove_keys(mine.built("assign_moving_average"), np.setdiff1d(known, keys))
    dim = mine.spec.dim
    for start, size in blocks([len(keys), dim], tf.float32):
        some = keys[start : start + size]
        rows = other.variables[PARAMETERS].collect_rows(some)
        old = np.isin(some, known)
        before = mine.variables[PARAMETERS].collect_rows(some[old])
        rows[old] = blend(before, rows[old], rate)
        mine.assign_numbers(some, tf.constant(rows))
    if mine.key_texts is not None and other.key_texts is not None:
        mine.key_texts.learn(keys, other.keys())
