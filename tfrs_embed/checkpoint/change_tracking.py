"""The rows of tables that change, by the moments between which they do.

A moment ends when somebody asks for it. Rows are marked with the moment of
their last change, in one byte (`storage/row_marks.py`). There are more moments
than a byte has values: older ones are then merged two by two, so that all rows
which changed after an old moment are still found, with some that changed a
little earlier.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.configs.tables import TableSpec

# Marks are 1 and more; 0: the row has not changed since marks exist.
_LAST_MARK = 255


class Moments:
    """Numbers the moments of an engine's tables, one after the other.

    Attributes:
        tracking: whether the engine's stores mark rows.
        present: the number of the present moment.
    """

    def __init__(self) -> None:
        self.tracking = False
        self._stores: list[Any] = []
        self._watching: list[Callable[[], None]] = []
        self.present = 1
        # The last moment of each mark; the present one has no end.
        self._ends = [0]

    def add(self, store: Any) -> None:
        """Adds a `RowStore` of the engine that is built."""
        self._stores.append(store)
        if self.tracking:
            store.track()

    def watch(self, note: Callable[[], None]) -> None:
        """Calls a function as soon as changes are tracked.

        It is called again each time before a moment ends.
        """
        self._watching.append(note)
        if self.tracking:
            note()

    def track(self) -> None:
        """Begins to mark rows; a second call does nothing."""
        if not self.tracking:
            for store in self._stores:
                store.track()
            self.tracking = True
            for note in self._watching:
                note()

    def end(self) -> int:
        """Ends the present moment, and returns its number, at least 1."""
        for note in self._watching:
            note()
        self._ends.append(self.present)
        self.present += 1
        if len(self._ends) > _LAST_MARK:
            # Marks 2n - 1 and 2n become n.
            merged = (np.arange(_LAST_MARK + 1) + 1) // 2
            self._ends = self._ends[::2]
            if self._ends[-1] != self.present - 1:
                self._ends.append(self.present - 1)
            for store in self._stores:
                store.marks.renumber(merged.astype(np.uint8))
        for store in self._stores:
            store.marks.begin(len(self._ends))
        return self.present - 1

    def mark_of(self, moment: int) -> int:
        """Returns the mark above which rows have changed after a moment."""
        return bisect.bisect_right(self._ends, moment) - 1


class ChangedRows(NamedTuple):
    """The rows of a table that have changed since a moment.

    They are those that this process holds.

    Attributes:
        rows: [n] int64 ascending, the numbers of the changed rows; of a table
            of keys the changed keys, shard after shard, with new ones.
        removed: [r] int64, the keys that have lost their rows, in any order.
        shards: each local shard's number of `rows`; one number if they are in
            the order of the table.
    """

    rows: np.ndarray
    removed: np.ndarray
    shards: tuple[int, ...]


class TrackedTable:
    """A table whose changes can be tracked.

    Attributes:
        spec: the table.
        sources: the parts of the table that this process holds, each row once,
            and the stores that hold them.
        moments: what numbers its moments, an object for all tables of an
            engine; None: its changes can't be tracked.
        restored_from: the checkpoint from which it was last restored; None: it
            never was, or lost sight of its changes since.
        known_since: the first moment after which all changes are known.
        strategy: the strategy under which it is made; None: unknown.
    """

    spec: TableSpec
    sources: Sequence[tuple[Any, Any]] = ()
    moments: Moments | None = None
    restored_from: str | None = None
    known_since = 0
    strategy: tf.distribute.Strategy | None = None

    @property
    def is_tracked(self) -> bool:
        """Whether the table's changes are tracked."""
        return self.moments is not None and self.moments.tracking

    def track_changes(self) -> None:
        """Begins to track which rows change, for `changed`.

        It takes one byte a row. All tables of the layer that are held like this
        one are tracked too. A second call does nothing.

        Raises:
            NotImplementedError: a Keras layer or a TPU holds the table.
            RuntimeError: a training step was traced before.
        """
        if self.moments is None:
            raise NotImplementedError(
                f"Table '{self.spec.name}' is held by a Keras layer or by a "
                "TPU: which of its rows change is not known."
            )
        self.moments.track()

    def moment(self) -> int:
        """Ends a moment, for `changed`, and returns its number.

        Call it eagerly, between steps. The numbers grow, and are those of this
        process.

        Raises:
            RuntimeError: changes aren't tracked; see `track_changes`.
        """
        return self._tracked().end()

    def changed(self, since: int) -> ChangedRows:
        """Returns the rows that have changed since a moment.

        These are the rows that this process holds. They were updated, assigned
        to, or given to other keys, in the table or in slots. After many moments
        some that changed a little earlier are among them. Call it eagerly,
        between steps.

        Example:
            >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
            >>> layer = tfrs_embed.PartialTPUEmbedding(
            ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
            ... )
            >>> layer.build()
            >>> movies = layer.tables["movie"]
            >>> movies.track_changes()
            >>> before = movies.moment()
            >>> with tf.GradientTape() as tape:
            ...     loss = tf.reduce_sum(layer(tf.constant([5, 3, 5])))
            >>> _ = tape.gradient(loss, layer.trainable_variables)
            >>> movies.changed(since=before).rows.tolist()
            [3, 5]

        Args:
            since: a number that `moment` returned.

        Raises:
            ValueError: there is no such moment, or the table was restored after
                it.
            RuntimeError: changes aren't tracked; see `track_changes`.
        """
        mark = self._mark_of(since)
        found = []
        for part, store in self.sources:
            here = store.marks.above(self.spec.name, mark) - part.offset
            here = here[(here >= 0) & (here < len(part.rows))]
            found.append(part.rows.start + here * part.rows.step)
        rows = np.unique(np.concatenate([np.zeros([0], np.int64), *found]))
        return ChangedRows(rows, np.zeros([0], np.int64), (len(rows),))

    def restored(self, prefix: str | None) -> None:
        """Begins to track anew, when a checkpoint `prefix` is restored."""
        if self.is_tracked and self.sources:
            self.known_since = self.moment()
            for _, store in self.sources:
                store.marks.clear(self.spec.name)
        self.restored_from = prefix

    def assigned(self) -> None:
        """Notes that all rows may have changed."""
        if self.is_tracked:
            for _, store in self.sources:
                store.marks.mark_some(self.spec.name, None)

    def _tracked(self) -> Moments:
        if self.moments is None or not self.moments.tracking:
            raise RuntimeError(
                f"Changes of table '{self.spec.name}' aren't tracked: call its "
                "track_changes before the first training step."
            )
        return self.moments

    def _mark_of(self, since: int) -> int:
        """Returns the mark above which rows have changed since a moment."""
        moments, where = self._tracked(), f"Table '{self.spec.name}'"
        if not 0 <= since < moments.present:
            raise ValueError(
                f"{where}: since must be a number that moment() returned, "
                f"below {moments.present}, got {since}."
            )
        if since < self.known_since:
            raise ValueError(
                f"{where} was restored, or lost sight of its changes, at "
                f"moment {self.known_since}: what changed since {since} isn't "
                "known."
            )
        return moments.mark_of(since)


def end_moments(tables: Iterable[TrackedTable]) -> dict[TrackedTable, int]:
    """Ends the present moment of tracked tables; returns its number by table.

    Tables of one engine share their moments, of which there are not too many.
    """
    tracked = [table for table in tables if table.is_tracked]
    ended: dict[Any, int] = {}
    for table in tracked:
        if table.moments not in ended:
            ended[table.moments] = table.moment()
    return {table: ended[table.moments] for table in tracked}
