"""Writes tables while training goes on."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Mapping

from tfrs_embed.checkpoint import bundle, chain
from tfrs_embed.checkpoint.change_tracking import TrackedTable
from tfrs_embed.checkpoint.rows import (
    CheckpointValue,
    Save,
)


class BackgroundFile:
    """A file that a thread writes: the tables that the next deltas continue.

    It holds each table's rows as they are at some moment after the beginning.
    Deltas of what has changed since then make them right, so the file is no
    checkpoint by itself.

    Args:
        path: the file's.
        found: the values to write, by key.
        moments: the tables and their moments now, between steps.

    Attributes:
        link: its place, the first in its chain.
        path, moments: the arguments.
    """

    def __init__(
        self,
        path: str,
        found: Mapping[str, CheckpointValue],
        moments: Mapping[TrackedTable, int],
    ) -> None:
        self.path, self.moments = path, dict(moments)
        self.link = chain.Link.first()
        self.error: Exception | None = None
        save = Save(in_background=True)
        self._slices = [
            saved.slices(key, save)
            for key, saved in found.items()
            if saved.table in self.moments
        ]
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        # A thread of TensorFlow's operations must not outlive the interpreter.
        self._stop_at_exit = weakref.finalize(
            self, _stop, self._stop, self._thread
        )

    @property
    def is_done(self) -> bool:
        """Whether the file is complete, or its writing has failed."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Waits until the thread has ended."""
        self._thread.join()

    def _run(self) -> None:
        try:
            writer = bundle.BundleWriter(f"{self.path}_temp/part")
            writer.add(chain.HEADER, self.link.header())
            for each in itertools.chain.from_iterable(self._slices):
                if self._stop.is_set():
                    raise InterruptedError("The process ends.")
                writer.add(*each)
            bundle.merge(writer.finish(), self.path)
        except Exception as error:
            self.error = error
        self._slices = []


def _stop(stop: threading.Event, thread: threading.Thread) -> None:
    stop.set()
    # The thread itself ends the file of a manager that the program has dropped.
    if thread is not threading.current_thread():
        thread.join()
