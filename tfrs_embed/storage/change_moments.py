"""The moments between which rows of tables change.

A moment ends when somebody asks for it. Rows are marked with the moment of
their last change, in one byte (`row_marks.py`). There are more moments than a
byte has values: older ones are then merged two by two, so that all rows which
changed after an old moment are still found, with some that changed a little
earlier.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tfrs_embed.storage.row_store import RowStore

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
        self._stores: list[RowStore] = []
        self._waiting: list[Callable[[], None]] = []
        self.present = 1
        # The last moment of each mark; the present one has no end.
        self._ends = [0]

    def add(self, store: RowStore) -> None:
        """Adds a store of the engine that is built."""
        self._stores.append(store)
        if self.tracking:
            store.track()

    def when_tracking(self, begin: Callable[[], None]) -> None:
        """Calls a function as soon as changes are tracked."""
        if self.tracking:
            begin()
        else:
            self._waiting.append(begin)

    def track(self) -> None:
        """Begins to mark rows; a second call does nothing."""
        if not self.tracking:
            for store in self._stores:
                store.track()
            self.tracking = True
            for begin in self._waiting:
                begin()

    def end(self) -> int:
        """Ends the present moment, and returns its number, at least 1."""
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
