"""A warning if a worker waits long for others, between training steps.

Workers build layers, and save and read sharded tables, together. If one worker
does so alone, TensorFlow's collectives wait without a message.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from absl import logging

from tfrs_embed.distribution.replicas import Replicas

#: Seconds after which a wait is reported.
AFTER_S = 10


@contextlib.contextmanager
def together(replicas: Replicas, action: str) -> Iterator[None]:
    """Runs a collective between steps; reports a long wait for other workers.

    `action` is what all workers do, for example "read 'movies/parameters'".
    """
    if replicas.workers == 1:
        yield
        return

    def warn() -> None:
        logging.warning(
            "Worker %d has waited for %g s to %s, which all workers must do "
            "together. The usual cause is a call in one worker alone, such as "
            "`if chief: ...`, or in another order. Another worker's log may "
            "say that it waits for something else.",
            replicas.worker,
            AFTER_S,
            action,
        )

    timer = threading.Timer(AFTER_S, warn)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
