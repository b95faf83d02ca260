"""A part of a table with keys, for checkpoints: keys, rows, or a slot."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import (
    BundleReader,
    TensorSlice,
    blocks,
    in_slices,
)
from tfrs_embed.checkpoint.change_tracking import ChangedRows
from tfrs_embed.checkpoint.names import in_delta, sibling
from tfrs_embed.checkpoint.rows import (
    CANDIDATES,
    FREQUENCY,
    KEYS,
    LAST_TIME,
    LAST_USED,
    REMOVED,
    SCORE,
    TEXT,
    CheckpointValue,
    HeldRows,
    Save,
    other_slot,
)
from tfrs_embed.checkpoint.value_copies import copy_for_saving
from tfrs_embed.ops.key_inputs import fingerprints
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.storage import key_scores
from tfrs_embed.storage.composite import CompositeVariable
from tfrs_embed.storage.key_rules import LiveKeys
from tfrs_embed.storage.key_texts import UNKNOWN
from tfrs_embed.storage.keyed_shard import KeyedShard
from tfrs_embed.storage.table_keys import (
    TableKeys,
    as_counter,
    field_of,
    of_counter,
    require_past,
)


class KeyedVariable(CompositeVariable, CheckpointValue):
    """A part of a table with keys, of all shards, sorted by key.

    With several workers, reading gathers the values of all, and saving has each
    worker write its own: all workers must do it. When the variable is written
    or restored, every worker gets the same value and keeps its shard.

    A checkpoint holds the part shard by shard, so that no process needs all of
    it. Its parts are "keys", "frequency" (or "score", float32, if the program
    gives scores), "last_used" (or "last_used_time", if the table counts in
    time), "candidates", "parameters" and the slots; and "text", strings that
    the first worker writes as a whole: TensorFlow reads no slices of strings.
    """

    def __init__(
        self,
        table: str,
        part: str,
        rows: TableKeys,
        strategy: tf.distribute.Strategy,
    ) -> None:
        # Integers have no variables of their own.
        name = part if part in rows.names else PARAMETERS
        super().__init__([s.variables[name] for s in rows.shards], strategy)
        self.name = f"{table}/{part}:0"
        is_float = part in rows.names or part == SCORE
        self.dtype = tf.float32 if is_float else tf.int64
        if part == TEXT:
            self.dtype = tf.string
        without = dict.fromkeys((KEYS, TEXT, *rows.counters), ())
        shapes = {CANDIDATES: (3,)} | without
        row = shapes.get(part, self._variables[0].shape[1:])
        self.shape = tf.TensorShape([None, *row])
        self.workers = rows.replicas.workers
        self.replicas = rows.replicas
        self._rows = rows
        self._part = part
        # Checkpoints of tables without keys lack integers.
        self.optional = part not in rows.names
        # Keys come first: the other parts belong to them.
        self.order = 0 if part == KEYS else 1

    @property
    def current_shape(self) -> tf.TensorShape:
        """The shape with the present number of keys; all workers must ask."""
        if self._part == CANDIDATES:
            return tf.TensorShape(self.numpy().shape)
        count = sum(self._rows.numbers("size"))
        return tf.TensorShape([count, *self.shape[1:]])

    def numpy(self) -> np.ndarray:
        """Returns the part of all shards, sorted by key.

        Raises:
            RuntimeError: another thread changed the keys meanwhile.
        """
        rows, part = self._rows, self._part
        if part == TEXT:
            return self._texts_of(np.sort(self._all(KEYS)))
        if part in (KEYS, CANDIDATES):
            found = self._all(part)
            return found[np.argsort(found if part == KEYS else found[:, 0])]
        moment = rows.moment()
        found, keys = self._all(part), self._all(KEYS)
        rows.require_moment(moment, f"its {part} were read")
        return found[np.argsort(keys)]

    def _texts_of(self, keys: np.ndarray) -> np.ndarray:
        assert self._rows.texts is not None
        return self._rows.texts.read(keys)

    def _all(self, part: str) -> np.ndarray:
        """Returns a part of all shards, shard after shard, by row in each."""
        shards = self._rows.shards
        if part in self._rows.names:
            here = [s.gather(part, s.live().rows).numpy() for s in shards]
        else:
            field = field_of(part)
            here = [of_counter(part, s.integers(field)) for s in shards]
        return np.concatenate(self._rows.gather(here))

    def collect_rows(self, keys: np.ndarray) -> np.ndarray:
        """Returns rows of keys; all workers must call with the same keys."""
        here = [
            shard.gather(self._part, rows).numpy()
            for shard, _, rows in self._rows.located(keys)
        ]
        shards = self._rows.shards_of(keys)
        found = np.empty((len(keys), *self.shape[1:]), np.float32)
        found[np.argsort(shards, kind="stable")] = np.concatenate(
            self._rows.gather(here)
        )
        return found

    def held(self) -> list[HeldRows]:
        part, found = self._part, []
        row = self.dtype.size * math.prod(self.shape[1:])
        has_rows = part in (*self._rows.names, *self._rows.counters)
        for shard in self._rows.shards if has_rows else ():
            live = shard.live()

            def gather(
                wanted: np.ndarray,
                shard: KeyedShard = shard,
                live: LiveKeys = live,
            ) -> tf.Tensor:
                if part in self._rows.names:
                    return shard.gather(part, live.rows[wanted])
                values = getattr(live, field_of(part))[wanted]
                return tf.constant(of_counter(part, values))

            size = len(live.keys)
            found.append(HeldRows(size, row * size, gather, live.keys))
        return found

    @property
    def nbytes(self) -> int:
        if self._part == CANDIDATES:
            return 0  # They are few, and small.
        count = sum(s.key_table.numbers().size for s in self._rows.shards)
        return count * math.prod(self.shape[1:]) * self.dtype.size

    def assign(self, value: Any) -> None:
        """Sets the whole value: keys replace all keys, and reset their rows.

        Keys, [n] int64 ascending, get initial rows, initial slots and counters
        of zero. Candidates replace all candidates. Other parts, [n, ...],
        belong to the keys that the table has.

        Raises:
            ValueError: the shape is wrong, keys are not ascending, or a shard
                has no room for them.
            RuntimeError: with several workers, keys came after the last write
                of keys.
        """
        value, rows, part = np.asarray(value), self._rows, self._part
        if part == CANDIDATES:
            value = _checked_integers(part, value, 0, rows.owner)
            if rows.rules.by_time:
                require_past(value[:, 2], rows.owner)
            shard_of = rows.shards_of(value[:, 0])
            for rank, shard in rows.by_rank:
                shard.set_known(candidates=value[shard_of == rank])
        elif part == KEYS:
            self.check_value(value)
            rows.replace(value, {})
        else:
            keys = rows.keys_to_write_for()
            if part in rows.counters:
                value = _checked_counter(part, value, len(keys), rows.owner)
            if part == LAST_TIME:
                require_past(value, rows.owner)
            shape = (len(keys), *self.shape[1:])
            if value.shape != shape:
                raise ValueError(
                    f"{rows.owner} holds {len(keys)} keys: its {part} have the "
                    f"shape {list(shape)}, and can't be given a value of shape "
                    f"{list(value.shape)}."
                )
            rows.write_for(part, keys, value)
        if self.table is None:
            return
        if self._part == KEYS:
            self.table.restored(None)
        else:
            self.table.assigned()

    def check_value(self, value: Any) -> None:
        """Raises ValueError if `assign` would refuse keys, or scores."""
        if self._part == SCORE:
            key_scores.checked(value, len(value), self._rows.owner)
        if self._part != KEYS:
            return
        keys, owner = np.asarray(value), self._rows.owner
        if keys.dtype != np.int64 or keys.ndim != 1:
            raise ValueError(
                f"{owner}: keys must be int64 of shape [n], got "
                f"{keys.dtype} of shape {list(keys.shape)}."
            )
        if not np.all(keys[1:] > keys[:-1]):
            raise ValueError(
                f"{owner}: keys must be ascending, each of them once."
            )
        self._rows.require_room(keys)

    def slices(self, key: str, save: Save) -> Iterator[TensorSlice]:
        """Returns the part of this process's shards, one after the other.

        Raises:
            RuntimeError: in the end: another thread changed the keys since the
                table's first part was asked for.
        """
        rows, changed = self._rows, save.changed_in(self.table)
        if rows not in save.shared:
            moment = rows.moment()
            some: Sequence[Any] = [None] * len(rows.shards)
            if changed is not None:
                some = np.split(changed.rows, np.cumsum(changed.shards)[:-1])
            # Keys, and where their rows are. In the background other keys may
            # get these rows: the next delta has them, and keys that come back.
            live = [s.live(k) for s, k in zip(rows.shards, some, strict=True)]
            save.shared[rows] = moment, live
        moment, live = save.shared[rows]
        if self._part == TEXT:
            # Now: in the background keys may lose their texts.
            keys = np.concatenate(rows.gather([each.keys for each in live]))
            texts = _as_strings(self._texts_of(keys))
            key = key if changed is None else in_delta(key)
            is_chief = rows.replicas.worker == 0
            return iter([TensorSlice(key, texts)] * is_chief)
        return self._slices(key, save, changed, moment, live)

    def _slices(
        self,
        key: str,
        save: Save,
        changed: ChangedRows | None,
        moment: list[tuple[int, ...]],
        live: Sequence[LiveKeys],
    ) -> Iterator[TensorSlice]:
        rows, part = self._rows, self._part
        if part == CANDIDATES:
            if save.in_background:
                return
            found = [shard.integers(part) for shard in rows.shards]
        elif part in rows.names:
            found = [each.rows for each in live]
        else:
            field = field_of(part)
            found = [of_counter(part, getattr(each, field)) for each in live]
        if changed is not None and part == KEYS:
            others = [changed.removed[:0]] * (len(live) - 1)
            removed = [changed.removed, *others]
            yield from self._in_order(in_delta(key, REMOVED), removed)
        if changed is not None and part != CANDIDATES:
            key = in_delta(key)
        yield from self._in_order(key, found)
        if not save.in_background:
            rows.require_moment(moment, "it was saved")

    def _in_order(
        self, key: str, found: Sequence[np.ndarray]
    ) -> Iterator[TensorSlice]:
        """Yields what is found in shards; of parts with rows their numbers."""
        rows = self._rows
        sizes = rows.gather.numbers([len(each) for each in found])
        for (rank, shard), each in zip(rows.by_rank, found, strict=True):

            def read(
                first: int,
                size: int,
                shard: KeyedShard = shard,
                each: np.ndarray = each,
            ) -> Any:
                here = each[first : first + size]
                if self._part in rows.names:
                    return shard.gather(self._part, here)
                return here

            # The first shard has a value without rows.
            if sum(sizes) or rank == 0:
                shape = [len(each), *self.shape[1:]]
                start = sum(sizes[:rank])
                yield from in_slices(key, shape, read, start, sum(sizes))

    def check(self, key: str, reader: BundleReader) -> None:
        rows = self._rows
        if self._part == KEYS:
            _take_keys(rows, key, reader)
        if self._part not in rows.names:
            return  # It was read, and checked, with the keys.
        where = f"'{self.name}' can't be restored from '{reader.prefix}'"
        there = reader.shapes[key]
        if self._part == PARAMETERS and sibling(key, KEYS) not in reader.shapes:
            # The row numbers of a table without keys become keys.
            rows.take(np.arange(there[0]), {}, reader.prefix)
        if rows.source != reader.prefix:
            raise ValueError(f"{where}: it has no keys for its rows.")
        here = [rows.num_taken, *self.shape[1:]]
        if there != here:
            raise ValueError(
                f"{where}: with its keys it has the shape {here} here, and "
                f"{there} there.{other_slot(here, there)}"
            )

    def restore(self, key: str, reader: BundleReader) -> None:
        # This restores counters and candidates too.
        self._rows.restore_keys()
        if self._part not in self._rows.names:
            return
        there = sibling(key, KEYS)
        for start, size in blocks(reader.shapes[key], tf.float32):
            keys = np.arange(start, start + size)
            if there in reader.shapes:
                keys = reader.read_rows(there, start, size).numpy()
            values = reader.read_rows(key, start, size)
            self._rows.write_for(self._part, keys, values)

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        copy_for_saving(self, object_map)


def _take_keys(rows: TableKeys, key: str, reader: BundleReader) -> None:
    """Reads keys, counters, candidates, texts, for `TableKeys.restore_keys`.

    Raises:
        ValueError: the keys are invalid, a key was used in the future, or a
            shard has no room for its own.
    """
    keys = reader.read(key).numpy()
    where = f"{rows.owner}: '{reader.prefix}'"
    if keys.ndim != 1 or keys.dtype != np.int64:
        raise ValueError(
            f"{where} has keys of {keys.dtype} and shape "
            f"{list(keys.shape)}, not int64 of shape [n]."
        )
    if len(np.unique(keys)) != len(keys):
        raise ValueError(f"{where}: its keys must all differ.")
    known, by_time = {}, sibling(key, LAST_TIME) in reader.shapes
    if by_time and sibling(key, LAST_USED) in reader.shapes:
        raise ValueError(f"{where} has both steps and times of last use.")
    # Frequencies are no scores, nor scores frequencies: zeros replace them.
    count = SCORE if rows.rules.scored else FREQUENCY
    for name in (count, LAST_USED, LAST_TIME, CANDIDATES):
        there = sibling(key, name)
        if there in reader.shapes:
            values = _checked_counter(
                name, reader.read(there).numpy(), len(keys), where
            )
            known[field_of(name)] = as_counter(name, values)
    if by_time:
        require_past(known[LAST_USED], where)
    if by_time and CANDIDATES in known:
        require_past(known[CANDIDATES][:, 2], where)
    there = sibling(key, TEXT)
    if rows.texts is not None and there in reader.shapes:
        known[TEXT] = _checked_texts(reader, there, keys, where)
    rows.take(keys, known, reader.prefix, by_time)


def _checked_counter(
    name: str, values: np.ndarray, keys: int, what: str
) -> np.ndarray:
    """Returns counters, [keys], or candidates; errors name the table as `what`.

    Raises:
        TypeError: scores are no numbers.
        ValueError: `_checked_integers`, or `key_scores.checked`, refuses them.
    """
    if name == SCORE:
        return key_scores.checked(values, keys, what)
    return _checked_integers(name, values, keys, what)


def _checked_integers(
    name: str, values: np.ndarray, keys: int, what: str
) -> np.ndarray:
    """Returns counters as [keys] int64, or candidates as [c, 3] int64.

    Errors name the table as `what`.

    Raises:
        ValueError: the shape or dtype is wrong, or two candidates have one key.
    """
    values = np.asarray(values)
    wanted: list[int | None] = [keys]
    text = f"[{keys}], one for each key"
    if name == CANDIDATES:
        wanted, text = [None, 3], "[c, 3]"
    fits = tf.TensorShape(wanted).is_compatible_with(values.shape)
    if not fits or values.dtype.kind not in "iu":
        raise ValueError(
            f"{what}: {name} must be integers of shape {text}, got "
            f"{values.dtype} of shape {list(values.shape)}."
        )
    if name == CANDIDATES and len(np.unique(values[:, 0])) != len(values):
        raise ValueError(f"{what}: candidates must all differ.")
    return values.astype(np.int64)


def _checked_texts(
    reader: BundleReader, name: str, keys: np.ndarray, what: str
) -> np.ndarray:
    """Reads the texts of keys, [n] of bytes; errors name the table as `what`.

    Raises:
        ValueError: the shape or dtype is wrong, or a text is another key's.
    """
    shape, dtype = reader.shapes[name], reader.dtypes[name]
    if shape != [len(keys)] or dtype != tf.string:
        raise ValueError(
            f"{what}: {TEXT} must be strings of shape [{len(keys)}], one for "
            f"each key, got {dtype.name} of shape {shape}."
        )
    texts = reader.read(name).numpy() if len(keys) else np.zeros([0], object)
    other = fingerprints(_as_strings(texts)).numpy() != keys
    other &= texts != UNKNOWN
    if other.any():
        place = int(np.argmax(other))
        raise ValueError(
            f"{what}: the text {texts[place]!r:.80} is not of its key, number "
            f"{place}, {keys[place]}: its fingerprint is another one."
        )
    return texts


def _as_strings(texts: np.ndarray) -> tf.Tensor:
    with tf.device("CPU:0"):
        return tf.constant(texts, tf.string)
