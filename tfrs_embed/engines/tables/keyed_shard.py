"""A shard's rows of a table whose keys come and go."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import tensorflow as tf

from tfrs_embed import graphs, key_values
from tfrs_embed.checkpoint.rows import CANDIDATES
from tfrs_embed.configs import TableSpec
from tfrs_embed.dynamic_keys import KeysOfShards
from tfrs_embed.engines.tables.key_rules import ABSENT, Live, key_rules
from tfrs_embed.engines.tables.key_table import Found, KeyTable
from tfrs_embed.ops.checks import message
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import Slot
from tfrs_embed.storage.row_store import RowStore

# Keys that get rows between steps get their initial values in blocks of so many
# numbers.
_BLOCK_ELEMENTS = 1 << 20


class KeyedShard:
    """A shard's keys of one table, and the rows they have.

    Args:
        owner: whose they are, for errors.
        table: the table, one with keys.
        world: the number of shards.
        store: the shard's rows, all zero, and slots, all of their initial
            values; see `rows_at_first`.
        slots: the slots, by name.
        make_initial: makes keys' initial values; see `key_values.maker`.
    """

    def __init__(
        self,
        owner: str,
        table: TableSpec,
        world: int,
        store: RowStore,
        slots: Mapping[str, Slot],
        make_initial: key_values.Maker,
    ) -> None:
        self.owner = f"{owner}, table '{table.name}'"
        self._table = table
        self._world = world
        self._store = store
        self.variables = store.variables(table.name)
        self._slots = slots
        self.make_initial = make_initial
        self.rules = key_rules(table, world)
        self.key_table = KeyTable(self.rules)

    @property
    def dim(self) -> int:
        """The width of a row."""
        return self._table.dim

    def check_vectors(self, found: Found, vectors: tf.Tensor) -> tf.Tensor:
        """Clears vectors that may be other keys'.

        Args:
            found: the keys' rows.
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
        with tf.device(self._store.device):
            vectors = self._store.read(self._table.name, PARAMETERS, found.rows)
            return self.check_vectors(found, vectors)

    def no_room(
        self, keys: tf.Tensor, counts: tf.Tensor | None, lacking: tf.Tensor
    ) -> tf.Tensor:
        """Says that a step's keys lack rows: a scalar string."""
        dtype = self._table.keys.dtype  # type: ignore[union-attr]
        what = "the fingerprint of a key" if dtype == tf.string else "a key"
        more = "More rows make"
        if isinstance(self._table.keys, KeysOfShards):
            more = f"A larger {KeysOfShards.ROWS} makes"
        end = f" {more} room."
        if self._world > 1:
            end = f" Other shards may have free rows. {more} room on all."
        return _NO_ROOM(
            tf.constant(self.owner),
            tf.constant(f" is {what} without one.{end}"),
            self.key_table.info(),
            lacking,
            keys,
            tf.ones_like(keys) if counts is None else counts,
            self.key_table.find(keys),
            tf.constant(dtype == tf.uint64),
        )

    def write(self, name: str, rows: tf.Tensor, values: tf.Tensor) -> None:
        """Sets rows, [n] int64, of the parameters or a slot."""
        with tf.device(self._store.device):
            self._store.write(self._table.name, name, rows, values)

    def reset(self, rows: tf.Tensor, initial: tf.Tensor) -> None:
        """Gives rows initial values, and their slots theirs."""
        self.write(PARAMETERS, rows, initial)
        for name, slot in self._slots.items():
            shape = [tf.size(rows), *slot.row(self.dim)]
            self.write(name, rows, tf.fill(shape, slot.initial))

    def ensure_rows(self, rows: tf.Tensor) -> None:
        """Gives the variables as many rows at least; a scalar int64."""
        rules = self.rules
        if rules.policy == "none" and rules.max_capacity == rules.capacity:
            return  # Nothing makes room: there are all that there can be.
        self._store.resize(self._table.name, rows)

    # Eagerly, of what users and checkpoints read and write.

    def live(self) -> Live:
        """The keys that have rows, by row."""
        live = self.key_table.live()
        order = np.argsort(live.rows)
        return Live(*(values[order] for values in live))

    def integers(self, name: str) -> np.ndarray:
        """The keys or one of their counters, by row; or the candidates."""
        if name == CANDIDATES:
            return self.key_table.candidates()
        return getattr(self.live(), name)

    def gather(self, name: str, rows: np.ndarray) -> tf.Tensor:
        """Rows of the parameters or a slot, in the host's memory."""
        with tf.device(self._store.device):
            numbers = tf.constant(rows, tf.int64)
            found = self._store.read(self._table.name, name, numbers)
        with tf.device("CPU:0"):
            return tf.identity(found)

    def replace(
        self,
        keys: np.ndarray,
        frequency: np.ndarray,
        last_used: np.ndarray,
        candidates: np.ndarray,
    ) -> None:
        """Forgets all keys, and gives rows of initial values to others.

        Args:
            keys: [n] int64, unique.
            frequency: [n] int64.
            last_used: [n] int64.
            candidates: as `KeyTable.candidates` returns them.
        """
        rows, version = self.key_table.replace(
            keys, frequency, last_used, candidates
        )
        self.ensure_rows(self.key_table.physical())
        size = max(1, _BLOCK_ELEMENTS // self.dim)
        for start in range(0, len(keys), size):
            part = slice(start, start + size)
            self.reset(
                tf.constant(rows[part], tf.int64),
                self.make_initial(tf.constant(keys[part], tf.int64)),
            )
        self.key_table.publish(version)

    def set_known(
        self,
        frequency: np.ndarray | None = None,
        last_used: np.ndarray | None = None,
        candidates: np.ndarray | None = None,
    ) -> None:
        """Sets what is known of keys, and leaves their vectors alone.

        Args:
            frequency: of the keys that have rows, by row; None: as it is.
            last_used: of these, too.
            candidates: as `KeyTable.candidates` returns them; None: the
                same.
        """
        live = self.live()
        if candidates is None:
            candidates = self.key_table.candidates()
        rows, version = self.key_table.replace(
            live.keys,
            live.frequency if frequency is None else frequency,
            live.last_used if last_used is None else last_used,
            candidates,
        )
        if not np.array_equal(live.rows, rows):
            for name in self.variables:
                values = self.gather(name, live.rows)
                self.write(name, tf.constant(rows, tf.int64), values)
        self.key_table.publish(version)

    def remove(self, keys: np.ndarray, evicted: bool = False) -> int:
        """Takes the rows of keys; returns how many had one.

        Args:
            keys: [n] int64, unique.
            evicted: whether they count as evicted.
        """
        return int(np.sum(self.key_table.remove(keys, evicted) != ABSENT))


def _no_room(
    owner: tf.Tensor,
    end: tf.Tensor,
    info: tf.Tensor,
    lacking: tf.Tensor,
    keys: tf.Tensor,
    counts: tf.Tensor,
    rows: tf.Tensor,
    unsigned: tf.Tensor,
) -> tf.Tensor:
    """The text of `KeyedShard.no_room`, which tables don't trace each."""
    absent = tf.equal(rows, ABSENT) & (counts > 0)
    key = tf.reduce_sum(tf.boolean_mask(keys, absent)[:1])
    numbers = message(
        ": no room for the keys of this step: a shard has rows for ",
        info[1],
        " keys, and holds ",
        info[0],
        ". It needs ",
        lacking,
        " rows more than it can make room for; ",
    )
    named = tf.where(
        unsigned, message(tf.bitcast(key, tf.uint64)), message(key)
    )
    return tf.strings.join([owner, numbers, named, end])


_NO_ROOM = graphs.TracedOnce(
    _no_room,
    tf.TensorSpec([], tf.string),
    tf.TensorSpec([], tf.string),
    tf.TensorSpec([None], tf.int64),
    tf.TensorSpec([], tf.int64),
    tf.TensorSpec([None], tf.int64),
    tf.TensorSpec([None], tf.int64),
    tf.TensorSpec([None], tf.int64),
    tf.TensorSpec([], tf.bool),
)
