"""The progress of a long read, on a terminal."""

from __future__ import annotations

import sys
import time

from tfrs_embed.text_table import format_bytes

_INTERVAL_S = 0.1


class Progress:
    """A line on stderr, if that is a terminal.

    Args:
        total: the number of bytes that there will be.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._shown = 0.0
        self._on = sys.stderr.isatty()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._on and self._shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def __call__(self, nbytes: int) -> None:
        """Counts bytes that are done."""
        self._done += nbytes
        now = time.monotonic()
        if not self._on or now - self._shown < _INTERVAL_S:
            return
        self._shown = now
        share = min(1.0, self._done / max(1, self._total))
        bar = ("#" * round(30 * share)).ljust(30, ".")
        print(
            f"\r[{bar}] {share:4.0%} of {format_bytes(self._total)}\033[K",
            end="",
            file=sys.stderr,
            flush=True,
        )
