"""Rows of tables with keys, in memory.

A lookup finds the rows of keys. In a training step it also reserves rows for
new keys, which get these rows when the step's update commits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import graphs
from tfrs_embed.compat.private_tensorflow import save_context
from tfrs_embed.ops import concat_gradients
from tfrs_embed.ops import lookup as lookup_ops
from tfrs_embed.ops.bags import BaggedIds, bag_of_id, concat, num_rows, split
from tfrs_embed.ops.checks import Consensus
from tfrs_embed.ops.rounding import widen
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import Slot
from tfrs_embed.storage import clock
from tfrs_embed.storage.key_rules import TRASH, rows_at_first
from tfrs_embed.storage.key_table import FoundKeys, KeyRows, KeyTable
from tfrs_embed.storage.keyed_shard import KeyedShard
from tfrs_embed.storage.memory import MemoryRows
from tfrs_embed.storage.reservation import StepKeys, commit, reserve
from tfrs_embed.storage.row_store import (
    IdsOfTables,
    Located,
    TableShare,
    host_of,
)

# A table that grows gets one spare row for this many rows.
_SPARE_PART = 32


class KeyedRows(MemoryRows):
    """Finds the rows of keys, and gives rows to new keys.

    Attributes:
        shards: the keys and rows of each table by name.
    """

    trash = TRASH
    _grows = True

    def build(self, tables: Sequence[TableShare]) -> None:
        super().build(
            [
                dataclasses.replace(t, rows=rows_at_first(t.spec, t.world))
                for t in tables
            ]
        )
        self.shards = {t.spec.name: KeyedShard(t, self) for t in tables}
        # Tables of one width that are all trained, or all not, and have equally
        # many fallback rows, by table.
        self._together: dict[str, KeyTable] = {}
        kinds: dict[Any, list[KeyTable]] = {}
        for shard in self.shards.values():
            rows = shard.rules.fallback_rows
            kind = shard.table.dim, shard.is_trained, rows
            kinds.setdefault(kind, []).append(shard.key_table)
        for alone in kinds.values():
            joined = KeyTable.joined(alone)
            self._together.update(dict.fromkeys(joined.names, joined))

    def locate(
        self,
        ids: Sequence[IdsOfTables],
        training: bool,
        step: Any = None,
        consensus: Consensus | None = None,
    ) -> Located:
        if save_context.in_save_context():
            owner = next(iter(self.shards.values())).layer
            raise RuntimeError(
                f"{owner} has tables with DynamicKeys, which only "
                "tfrs_embed.serving.export exports."
            )
        moment = None if step is None else self._moment(step)
        places: dict[KeyTable, list[int]] = {}
        for i, each in enumerate(ids):
            places.setdefault(self._together[each.tables[0]], []).append(i)
        new: list[StepKeys] = []
        others: list[StepKeys] = []
        for table, mine in places.items():
            shards = [self.shards[name] for name in table.names]
            joined = _joined(table, [ids[i] for i in mine])
            trains = training and shards[0].is_trained
            (new if trains else others).append(
                StepKeys(mine, table, shards, *joined, moment)
            )
        kept: list[tuple[StepKeys, FoundKeys | KeyRows]] = [
            *zip(new, reserve(new, consensus), strict=True),
            *((k, k.table.lookup(k.keys, k.table_of)) for k in others),
        ]
        rows: list[Any] = [None] * len(ids)
        like = [each.ids for each in ids]
        for keys, found in kept:
            _put(rows, keys.places, found.rows, like)
        return Located(rows, kept)

    def _moment(self, step: Any) -> tf.Tensor:
        """Returns the number of the step after `step`, and its time."""
        by_time = any(s.rules.by_time for s in self.shards.values())
        number = tf.convert_to_tensor(step) + 1
        with tf.device(host_of(self.device)):
            return tf.stack([number, clock.read(number) if by_time else 0])

    def check(
        self,
        located: Located,
        vectors: Sequence[tf.Tensor],
        bags: Sequence[BaggedIds] | None = None,
    ) -> list[tf.Tensor]:
        # No other thread changes reserved rows.
        found = [
            kept for kept in located.kept if isinstance(kept[1], FoundKeys)
        ]
        places = [place for keys, _ in found for place in keys.places]
        checked = list(vectors)
        if not places:
            return checked
        with tf.control_dependencies(graphs.capture(vectors)):
            changed = tf.add_n(
                [_num_changed(k.table, rows) for k, rows in found]
            )

        def read_again() -> list[tf.Tensor]:
            again: list[Any] = [None] * len(vectors)
            for keys, rows in found:
                read = self.read_found(keys.table, rows)
                _put(again, keys.places, read, located.rows)
            if bags is not None:
                for i in places:
                    again[i] = lookup_ops.combine(
                        widen(again[i]), None, bags[i]
                    )
            return [
                tf.reshape(
                    tf.cast(again[i], vectors[i].dtype), tf.shape(vectors[i])
                )
                for i in places
            ]

        read = tf.cond(
            changed > 0,
            read_again,
            lambda: [tf.identity(vectors[i]) for i in places],
        )
        for i, each in zip(places, read, strict=True):
            each.set_shape(vectors[i].shape)
            checked[i] = each
        return checked

    def commit(
        self, located: Located, gradients: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        kept = [kept for kept in located.kept if isinstance(kept[1], KeyRows)]
        made = concat_gradients.find_matrices(gradients)
        # Not if the loss or its gradient fails, or if there is no room for
        # another table's keys.
        after = [*made.matrices, *(reserved.rows for _, reserved in kept)]
        with tf.control_dependencies(graphs.capture(after)):
            committed = commit(kept)
        rows = list(located.rows)
        for (keys, _), of_keys in zip(kept, committed, strict=True):
            _put(rows, keys.places, of_keys, located.rows)
        return rows

    def read_found(self, table: KeyTable, found: FoundKeys) -> tf.Tensor:
        """Reads keys' vectors, [n, dim]; see `KeyTable.check_vectors`."""
        number = len(table.names)

        def read(rows: tf.Tensor) -> tf.Tensor:
            if number == 1:
                return self.read(table.names[0], PARAMETERS, rows)
            places = tf.dynamic_partition(
                tf.range(tf.size(rows)), found.table_of, number
            )
            return tf.dynamic_stitch(
                places,
                [
                    self.read(name, PARAMETERS, tf.gather(rows, each))
                    for name, each in zip(table.names, places, strict=True)
                ],
            )

        with tf.device(self.device):
            return table.check_vectors(found, read(found.rows), read)

    def read_ahead(self, table: str, ids: tf.Tensor) -> list[tf.Operation]:
        spill = self.shards[table].spill
        return [] if spill is None else [spill.read_ahead(ids)]

    def make_room(
        self, table: str, rows: Any, slots: Mapping[str, Slot]
    ) -> None:
        """Gives a table at least `rows` rows, int64, and some to spare.

        New rows are zeros, and their slots have the initial values. A table
        that has enough rows stays as it is.
        """
        slots = {PARAMETERS: Slot(0.0), **slots}
        variables = self.variables(table)
        [dim] = variables[PARAMETERS].shape[1:]
        handles = [variables[name].handle for name in slots]
        values = [(s.initial, s.row(dim), tf.float32) for s in slots.values()]
        if self._marks is not None:
            handles.append(self._marks.variables[table].handle)
            values.append((0.0, (), tf.uint8))
        with tf.device(self.device):
            _grow(rows, handles, tuple(values), host_of(self.device))


def _joined(
    table: KeyTable, ids: Sequence[IdsOfTables]
) -> tuple[tf.Tensor, tf.Tensor | None, tf.Tensor | None]:
    """Joins ids of tables: all keys, each key's table, and their counts."""
    first = ids[0]
    if first.table_of is not None:
        return first.ids, first.table_of, first.counts
    keys = [tf.cast(each.ids, tf.int64) for each in ids]
    if len(table.names) == 1:
        return concat(keys), None, first.counts
    numbers = [table.names.index(each.tables[0]) for each in ids]
    splits = tf.concat([[0], num_rows(keys)], 0)
    table_of = tf.gather(numbers, bag_of_id(tf.cumsum(splits)))
    return concat(keys), table_of, None


def _put(
    values: list[Any],
    places: Sequence[int],
    joined: tf.Tensor,
    like: Sequence[tf.Tensor],
) -> None:
    """Puts parts, as long as those of `like`, into their places."""
    parts = [joined]
    if len(places) > 1:
        parts = split(joined, [like[i] for i in places])
    for i, part in zip(places, parts, strict=True):
        values[i] = part


def _num_changed(table: KeyTable, found: FoundKeys) -> tf.Tensor:
    """The number of rows that changed keys, or were in spills, int64."""
    changed = table.check(found)[1]
    if found.vectors is None:
        return changed
    return changed + tf.shape(found.vectors, tf.int64)[0] - 1


# For each of a table's variables its initial value, a row's shape, its dtype.
_Slots = tuple[tuple[float, tuple[int, ...], tf.DType], ...]


# A function, so that several branches share one trace. It takes handles, since
# TensorFlow keeps graphs, which would keep variables alive.
@tf.function(autograph=False, **graphs.NOT_INLINED)
def _grow(
    rows: tf.Tensor, handles: list[tf.Tensor], slots: _Slots, host: str
) -> None:
    """Gives a table's variables at least `rows` rows, and some to spare."""
    shape = tf.raw_ops.VariableShape(input=handles[0])
    with tf.device(host):
        here = tf.cast(shape[0], tf.int64)
        lacking = rows > here

    def grow() -> tf.Tensor:
        with tf.device(host):
            more = rows - here + rows // _SPARE_PART
            sizes = [tf.stack([more, *row]) for _, row, _ in slots]
        for handle, size, (value, _, dtype) in zip(
            handles, sizes, slots, strict=True
        ):
            before = tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype)
            added = tf.fill(size, tf.cast(value, dtype))
            tf.raw_ops.AssignVariableOp(
                resource=handle, value=tf.concat([before, added], 0)
            )
        return tf.constant(True)

    tf.cond(lacking, grow, lambda: tf.constant(False))
