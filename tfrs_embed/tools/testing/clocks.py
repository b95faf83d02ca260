"""A clock for tables that count in time, for tests and simulations."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from tfrs_embed.storage import clock


@contextlib.contextmanager
def simulated_clock(seconds: Callable[[], float]) -> Iterator[None]:
    """Sets the clock by which keys of `DynamicKeys` tables age.

    Training steps, checkpoints and `evict` read this clock instead of the
    machine's, in this process. Don't use it in threads that train different
    models: there is one clock for all.

    Example:
        >>> days = [0]
        >>> with tfrs_embed.testing.simulated_clock(lambda: 86_400 * days[0]):
        ...     days[0] += 1  # Steps from here on are a day later.

    Args:
        seconds: returns the time in seconds since 1970.

    Yields:
        Nothing.

    Raises:
        TypeError: `seconds` can't be called.
    """
    if not callable(seconds):
        raise TypeError(
            f"simulated_clock: seconds must be a function, got {seconds!r}."
        )
    before, clock.simulated = clock.simulated, seconds
    try:
        yield
    finally:
        clock.simulated = before
