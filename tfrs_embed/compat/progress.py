"""Progress of long work: a bar on a terminal, lines in a log.

Work of less than 3 seconds shows nothing. On a terminal longer work shows a bar
with its rate and the time left; elsewhere, and in clusters of workers, a line
on stderr from time to time.

`set_mode` decides for the process, also for work without an argument for it, as
checkpoints that a callback saves. The environment variable
`TFRS_EMBED_PROGRESS` is the first mode. If stderr is closed, nothing is shown,
and the work goes on.

Example:
    >>> tfrs_embed.progress.set_mode("log")  # Of the whole process.
    >>> with tfrs_embed.progress.off():
    ...     path = tf.train.Checkpoint(x=tf.Variable(0)).save("quiet/x")
"""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, TypeVar, cast, get_args

from tfrs_embed.compat.arguments import choice
from tfrs_embed.compat.private_tensorflow import context
from tfrs_embed.compat.text_table import format_bytes, printable

__all__ = ["Mode", "off", "set_mode"]

T = TypeVar("T")

#: How progress is shown; see `set_mode`.
Mode = Literal["auto", "bar", "log", "off"]

#: The unit of what is counted in bytes.
BYTES = "B"

# Seconds before work is shown, between states of a bar, and between lines.
_AFTER_S = 3.0
_BAR_EVERY_S = 0.25
_LINE_EVERY_S = 30.0
# The characters of a bar.
_WIDTH = 10
# The share of the work from which the rest is estimated.
_LEAST_SHARE = 0.01

_VARIABLE = "TFRS_EMBED_PROGRESS"

# Tests have another.
_clock = time.monotonic


_mode: Mode = cast(Mode, os.environ.get(_VARIABLE, "auto").lower())
choice(_mode, get_args(Mode), _VARIABLE)
_offs = 0
_offs_lock = threading.Lock()


def set_mode(mode: Mode) -> None:
    """Sets how this process shows the progress of work that begins later.

    Example:
        >>> tfrs_embed.progress.set_mode("log")

    Args:
        mode: "auto": bars on a terminal, else lines; "bar": bars anywhere;
            "log": lines; "off": nothing.

    Raises:
        ValueError: the mode is none of these.
    """
    global _mode
    choice(mode, get_args(Mode), "mode")
    _mode = mode


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Shows no progress of work that begins inside, in any thread.

    Example:
        >>> with tfrs_embed.progress.off():
        ...     path = tf.train.Checkpoint(x=tf.Variable(0)).save("quiet/x")

    Yields:
        Nothing.
    """
    global _offs
    with _offs_lock:
        _offs += 1
    try:
        yield
    finally:
        with _offs_lock:
            _offs -= 1


class Task:
    """Work that may take long, with a count of what is done.

    Args:
        verb: the kind of work, "Saving".
        what: its object.
        total: the final count; None: unknown. It grows if it is exceeded.
        unit: the counted unit: `BYTES`, or a word in the plural.
        show: whether to show it, unless the mode is "off".
    """

    def __init__(
        self,
        verb: str,
        what: str,
        total: int | None = None,
        unit: str = BYTES,
        *,
        show: bool = True,
    ) -> None:
        self.label = printable(f"{verb} {what}")
        self.done = 0
        self.total = total
        self.unit = unit
        self._shown = show
        # Whether it is drawn as a bar; None: nothing was shown yet.
        self._bar: bool | None = None
        self._lock = threading.RLock()

    def __enter__(self) -> Task:
        self._mode: Mode = "off" if _offs else _mode
        self._shown = self._shown and self._mode != "off"
        self._start = _clock()
        self._next = self._start + _AFTER_S
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._lock:
            if kind is None and self.total is not None:
                self.total = self.done
            if self._shown and self._bar is not None:
                until = "done" if kind is None else "stopped"
                took = f"{self._amount(self.done)} in {_time(self.elapsed)}"
                self._show(f"{self.label}: {until}, {took}")
            self._shown = False

    def advance(self, amount: int = 1) -> None:
        """Adds to the count; any thread may."""
        with self._lock:
            self.done += amount
            if self.total is not None:
                self.total = max(self.total, self.done)
            if self._shown and _clock() >= self._next:
                self._show()

    def count(self, items: Iterable[T]) -> Iterator[T]:
        """Yields items; each counts when the next one is requested."""
        for item in items:
            yield item
            self.advance()

    @property
    def elapsed(self) -> float:
        """Seconds since the beginning."""
        return _clock() - self._start

    @property
    def left(self) -> float | None:
        """Seconds until the end; None: unknown."""
        if self.total is None:
            return None
        if self.done < _LEAST_SHARE * self.total:
            return None
        return (self.total - self.done) / self.done * self.elapsed

    def _state(self) -> str:
        """Returns the count, the rate and the time left, as text."""
        rate, unit = self.done / max(self.elapsed, 1e-9), "second"
        if self.unit != BYTES and rate < 1:
            rate, unit = 60 * rate, "minute"
        speed = f"{self._amount(rate, 1)} a {unit}"
        if self.total is None:
            return f"{self.label}: {self._amount(self.done)}, {speed}"
        rest = (
            f" after {_time(self.elapsed)}"
            if self.left is None
            else f", {speed}, {_time(self.left)} left"
        )
        share = self.done / max(1, self.total)
        bar = ""
        if self._draws_bars():
            bar = f"|{'#' * int(_WIDTH * share):{_WIDTH}}| "
        total = self._amount(self.total)
        return f"{self.label}: {bar}{share:.0%} of {total}{rest}"

    def _amount(self, number: float, digits: int = 0) -> str:
        if self.unit == BYTES:
            return format_bytes(number)
        return f"{number:,.{digits}f} {self.unit}"

    def _draws_bars(self) -> bool:
        if self._bar is None:
            service: Any = context.context()
            in_cluster = getattr(service, "_collective_ops_server_def", None)
            self._bar = self._mode == "bar" or (
                self._mode == "auto"
                and in_cluster is None
                and sys.stderr is not None
                and sys.stderr.isatty()
            )
        return self._bar

    def _show(self, last: str = "") -> None:
        try:
            text = last or self._state()
            if self._draws_bars():
                # A longer text would wrap and could not be overwritten.
                width = shutil.get_terminal_size().columns - 1
                _print(f"\r{text[:width]:{width}}" + ("\n" if last else ""))
            else:
                _print(f"{text}\n")
            every = _BAR_EVERY_S if self._bar else _LINE_EVERY_S
            self._next = _clock() + every
        except Exception:  # stderr may be anything, and in any state.
            self._shown = False


def size_of(items: Any) -> int | None:
    """Returns the number of items to iterate over; None: unknown."""
    if isinstance(items, Mapping):
        return None
    try:
        return len(items)
    except Exception:  # Datasets that don't know it raise some.
        return None


def _time(seconds: float) -> str:
    """Returns a duration as "1:02:05"."""
    return str(datetime.timedelta(seconds=round(seconds)))


def _print(text: str) -> None:
    if sys.stderr is not None:  # print would take None for stdout.
        print(text, end="", file=sys.stderr, flush=True)
