"""Updates of an exported model's tables, by TensorFlow's own operations.

An update is checked when it is made, and changes the table when it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.checkpoint.rows import FALLBACK, KEYS, REMOVED, ROWS
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.serving.tables import (
    COLUMNS,
    FREE,
    INDEX,
    NO_KEY,
    NO_ROW,
    ServedTable,
)


class Update(NamedTuple):
    """An update of a table.

    Attributes:
        checks: operations that fail if the update doesn't fit.
        write: makes the operations that change the table.
    """

    checks: Sequence[tf.Operation]
    write: Callable[[], Sequence[tf.Operation]]


def require(condition: Any, *words: Any) -> tf.Operation:
    """Makes an operation that fails with a message of strings."""
    return tf.debugging.Assert(condition, [tf.strings.join(words)])


def parts_of(table: ServedTable) -> dict[str, tf.TensorSpec]:
    """The tensors of a table in a delta, by name.

    The numbers of changed rows, or changed keys and keys that lost their rows,
    are [n] int64, ascending. Rows that keys share are there whole.
    """
    numbers = [KEYS, REMOVED] if INDEX in table.variables else [ROWS]
    parts = {name: tf.TensorSpec([None], tf.int64) for name in numbers}
    shared = len(table.fallback_rows)
    for name, variable in table.values().items():
        row = variable.shape[1:]
        parts[name] = tf.TensorSpec([None, *row], variable.dtype)
        if shared:
            each = tf.TensorSpec([shared, *row], variable.dtype)
            parts[f"{FALLBACK}{name}"] = each
    return parts


def make(
    where: tf.Tensor, table: ServedTable, given: Mapping[str, tf.Tensor]
) -> Update:
    """Makes the update of a table by `parts_of` a delta.

    Errors begin with `where`, a scalar string.
    """
    values = {name: given[name] for name in table.values()}
    # Without quotes: TensorFlow would escape them.
    where = tf.strings.join([where, f", table {table.name}: "])
    if INDEX in table.variables:
        shared = {
            name: given[f"{FALLBACK}{name}"]
            for name in table.values()
            if table.fallback_rows
        }
        keys = given[KEYS], given[REMOVED]
        return _of_keys(where, table, *keys, values, shared)
    rows, count = given[ROWS], table.shapes[PARAMETERS][0]
    fits = require(
        tf.reduce_all((rows >= 0) & (rows < count)),
        *(where, f"it has {count} rows; the delta has others."),
    )
    return Update(
        [fits, _same_size(where, rows, values)],
        lambda: _scatter(table, rows, values),
    )


def _same_size(
    where: tf.Tensor, rows: tf.Tensor, values: Mapping[str, tf.Tensor]
) -> tf.Operation:
    sizes = tf.stack([tf.shape(value)[0] for value in values.values()])
    return require(
        tf.reduce_all(sizes == tf.size(rows)),
        *(where, "the delta has not as many values as rows."),
    )


def _scatter(
    table: ServedTable, rows: tf.Tensor, values: Mapping[str, tf.Tensor]
) -> list[tf.Operation]:
    return [
        tf.raw_ops.ResourceScatterUpdate(
            resource=table.variables[name].handle, indices=rows, updates=value
        )
        for name, value in values.items()
    ]


def _of_keys(
    where: tf.Tensor,
    table: ServedTable,
    keys: tf.Tensor,
    removed: tf.Tensor,
    values: Mapping[str, tf.Tensor],
    shared: Mapping[str, tf.Tensor],
) -> Update:
    index = table.variables[INDEX].read_value()

    def find(asked: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns keys' places in the index, and their rows."""
        place = tf.searchsorted(index[0], asked, out_type=tf.int64)
        known = tf.gather(index[0], place) == asked
        return place, tf.where(known, tf.gather(index[1], place), NO_ROW)

    ascending = [
        require(
            tf.reduce_all(each[1:] > each[:-1]),
            *(where, "the delta's keys are not ascending."),
        )
        for each in (keys, removed)
    ]

    def write() -> list[tf.Operation]:
        _, rows = find(keys)
        place, lost = find(removed)
        lost, place = (
            tf.boolean_mask(x, lost != NO_ROW) for x in (lost, place)
        )
        added = tf.where(rows == NO_ROW)[:, 0]
        count = tf.size(added, tf.int64)
        free = table.variables[FREE].read_value()
        free, grown = _grow(table, free, count)
        rows = tf.tensor_scatter_nd_update(rows, added[:, None], free[:count])
        new = tf.stack([tf.gather(x, added) for x in (keys, rows)])

        def write_index() -> tf.Tensor:
            merged = _merged(index, place, new)
            table.variables[INDEX].assign(merged, read_value=False)
            return tf.constant(True)

        # A request that finds a key finds its row too.
        with tf.control_dependencies([grown]):
            written = _scatter(table, rows, values)
            shared_rows = tf.constant([*table.fallback_rows], tf.int64)
            written += _scatter(table, shared_rows, shared)
        with tf.control_dependencies(written):
            changed = count + tf.size(place, tf.int64) > 0
            # It takes time for all keys.
            written = [tf.cond(changed, write_index, lambda: False).op]
            # Requests that run now may still read these rows: the next delta
            # uses them.
            free = tf.concat([free[count:], lost], 0)
            written.append(table.variables[FREE].assign(free, read_value=False))
            return written

    return Update([*ascending, _same_size(where, keys, values)], write)


def _grow(
    table: ServedTable, free: tf.Tensor, wanted: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns at least `wanted` free rows; a table that lacks rows grows.

    It grows by a tenth at least: it is copied.
    """
    handle = table.variables[PARAMETERS].handle
    count = tf.raw_ops.VariableShape(input=handle, out_type=tf.int64)[0]
    lacking = tf.maximum(wanted - tf.size(free, tf.int64), 0)
    more = tf.where(lacking > 0, tf.maximum(lacking, count // 10), 0)

    def grow() -> tf.Tensor:
        new = tf.fill([more], tf.constant(NO_ROW, tf.int64))
        rows = tf.concat([tf.range(count), new], 0)
        for name in table.values():
            variable = table.variables[name]
            variable.assign(tf.gather(variable, rows), read_value=False)
        return tf.constant(True)

    grown = tf.cond(more > 0, grow, lambda: False)
    return tf.concat([free, tf.range(count, count + more)], 0), grown


def _merged(
    index: tf.Tensor, removed: tf.Tensor, added: tf.Tensor
) -> tf.Tensor:
    """Returns an index without the `removed` places and with `added` keys."""
    kept = tf.tensor_scatter_nd_update(
        index[1] != NO_ROW,
        removed[:, None],
        tf.zeros_like(removed, tf.bool),
    )
    # A merge: sorting takes ten times as long.
    old = tf.boolean_mask(index, kept, axis=1)
    num_old, num_added = (tf.shape(x, tf.int64)[1] for x in (old, added))
    total = num_old + num_added
    place = tf.searchsorted(old[0], added[0], out_type=tf.int64)
    place += tf.range(num_added)
    is_added = tf.scatter_nd(place[:, None], tf.ones_like(place), [total])
    before = tf.cumsum(is_added)
    source = tf.where(
        is_added == 1, num_old + before - 1, tf.range(total) - before
    )
    merged = tf.gather(tf.concat([old, added], 1), source, axis=1)
    end = tf.constant([[NO_KEY], [NO_ROW]], tf.int64)
    ends = tf.repeat(end, COLUMNS - total % COLUMNS, axis=1)
    return tf.concat([merged, ends], 1)
