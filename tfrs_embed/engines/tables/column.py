"""The keys, the rows or a slot of a table by key, seen as one variable."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed._tensorflow import Trackable
from tfrs_embed.checkpoint import saver
from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.rows import (
    CANDIDATES,
    KEYS,
    HeldRows,
    Saved,
    copy_for_saving,
    other_slot,
)
from tfrs_embed.checkpoint.session import Session
from tfrs_embed.engines.tables.composite import CompositeVariable
from tfrs_embed.engines.tables.keyed_rows import KeyedRows


class Column(CompositeVariable, Saved):
    """The keys, the rows or a slot of all shards, in the order of the keys.

    It has those parts of a variable's interface that see it whole.

    With several workers, reading it gathers the rows of all, and saving it has
    each write its own: all workers must do it. When it is written or restored,
    every worker gets the same value and keeps its shard.

    A checkpoint holds it shard by shard, so that nobody needs all of it.

    Args:
        name: the name, "<table>/keys" or the like.
        dtype: the dtype.
        shape: the static shape.
        shards: what this process's shards keep it in.
        rows: the rows by key.
        strategy: the strategy it was made under.
    """

    def __init__(
        self,
        name: str,
        dtype: tf.DType,
        shape: tuple[int | None, ...],
        shards: Sequence[Any],
        rows: KeyedRows,
        strategy: tf.distribute.Strategy,
    ) -> None:
        super().__init__(shards, strategy)
        self.name = f"{name}:0"
        self.dtype = dtype
        self.shape = tf.TensorShape(shape)
        self._rows = rows
        self._which = name.rpartition("/")[2]
        self.order = 0 if self._which == KEYS else 1

    @property
    def current_shape(self) -> tf.TensorShape:
        """The shape, with the keys that there are; all workers must ask."""
        return tf.TensorShape([sum(self._rows.key_counts()), *self.shape[1:]])

    def numpy(self) -> np.ndarray:
        """The whole value."""
        if self._which == KEYS:
            return self._rows.read_keys()
        return self._rows.read(self._which)

    def held(self) -> list[HeldRows]:
        """See the base class."""
        if self._which not in self._rows.names:
            return []
        return self._rows.held(self._which)

    @property
    def nbytes(self) -> int:
        """See the base class."""
        if self._which == CANDIDATES:
            return 0  # It has rows of its own, small ones.
        count = sum(self._rows.local_key_counts().values())
        return count * math.prod(self.shape[1:]) * self.dtype.size

    def assign(self, value: Any) -> None:
        """Sets the whole value.

        Args:
            value: keys replace all that there are, and their rows and slots
                become initial ones; rows and slots are those of the keys that
                there are.

        Raises:
            ValueError: another shape, keys that are not ascending, or more keys
                than a shard has rows for.
        """
        value = np.asarray(value)
        if self._which == KEYS:
            self._rows.write_keys(value)
        else:
            self._rows.write(self._which, value)

    def check_value(self, value: Any) -> None:
        """Checks keys that are to be assigned, and changes nothing.

        Raises:
            ValueError: they can't be.
        """
        if self._which == KEYS:
            self._rows.check_keys(np.asarray(value))

    @property
    def _workers(self) -> int:
        return self._rows.workers

    @property
    def _exported_whole(self) -> bool:
        # Keras loads it from there, into a layer that it makes anew.
        return self._rows.has_one_shard

    def save(self, key: str, session: Session) -> None:
        """See the base class."""
        self._rows.save(self._which, key, session)

    def check(self, key: str, reader: BundleReader) -> None:
        """See the base class."""
        where = f"'{self.name}' can't be restored from '{reader.prefix}'"
        there = reader.shapes[key]
        if self._which == KEYS:
            self._rows.read_new_keys(key, reader)
            return
        if self._rows.source != reader.prefix:
            raise ValueError(
                f"{where}: the checkpoint has no keys for its rows. It is of a "
                "layer with use_hashtable=False."
            )
        here = [self._rows.num_new_keys, *self.shape[1:]]
        if there != here:
            raise ValueError(
                f"{where}: with its keys it has the shape {here} here, and "
                f"{there} there.{other_slot(here, there)}"
            )

    def restore(self, key: str, reader: BundleReader) -> None:
        """See the base class."""
        if self._which == KEYS:
            self._rows.restore_keys()
        else:
            self._rows.restore(self._which, key, reader)

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        copy_for_saving(self, object_map, _Taken)

    def __repr__(self) -> str:
        """Name, shape and dtype."""
        return (
            f"<Column '{self.name}' shape={tuple(self.shape)} "
            f"dtype={self.dtype.name}>"
        )


class _Taken(Trackable, Saved):
    """A column's value when it was last taken."""

    def __init__(self, column: Column) -> None:
        self.name = column.name
        self.order = column.order
        self._column = column
        self._value: Any = None
        saver.mark(self, self)

    def take(self) -> None:
        """Reads the column."""
        self._value = self._column.numpy()

    @property
    def nbytes(self) -> int:
        """See the base class."""
        return 0 if self._value is None else np.asarray(self._value).nbytes

    def save(self, key: str, session: Session) -> None:
        """See the base class."""
        with tf.device("CPU:0"):
            session.writer().add_blocks(key, tf.constant(self._value))

    def check(self, key: str, reader: BundleReader) -> None:
        """See the base class."""
        self._column.check(key, reader)

    def restore(self, key: str, reader: BundleReader) -> None:
        """See the base class."""
        self._column.restore(key, reader)
