"""A warning if a worker waits long for others, between training steps.

Workers build layers, and save and read sharded tables, together. If one worker
does so alone, TensorFlow's collectives wait without a message.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import tensorflow as tf
from absl import logging

from tfrs_embed.distribution import key_value_store
from tfrs_embed.distribution.replicas import Replicas

#: Seconds after which a wait is reported.
AFTER_S = 10
# After this part of `AFTER_S` a worker tells the others what it waits for. Most
# collectives have ended by then, and send nothing.
_ANNOUNCED_AFTER = 0.1
# Seconds within which the store must answer.
_ANSWER_S = 0.1


@contextlib.contextmanager
def together(replicas: Replicas, action: str) -> Iterator[None]:
    """Runs a collective between steps; reports a long wait for other workers.

    All workers must enter in one order. `action` is what they do, for example
    "read 'movies/parameters'".
    """
    if replicas.workers == 1:
        yield
        return
    ended = threading.Event()
    prefix = f"tfrs_embed/{replicas.group}/wait/{replicas.count('waits')}"
    # In a thread, because the store may not answer.
    threading.Thread(
        target=_watch, args=[replicas, action, prefix, ended], daemon=True
    ).start()
    try:
        yield
    finally:
        ended.set()


def _watch(
    replicas: Replicas, action: str, prefix: str, ended: threading.Event
) -> None:
    """Reports a wait that takes long, unless `ended` is set before.

    Workers' texts about the wait have keys with this prefix.
    """
    first = _ANNOUNCED_AFTER * AFTER_S
    if ended.wait(first):
        return
    # If the service has ended, the collective fails with its own error.
    with contextlib.suppress(tf.errors.OpError):
        mine = f"{prefix}/{replicas.worker}"
        key_value_store.send(mine, action)
        causes = []
        if not ended.wait(AFTER_S - first):
            causes = list(_causes(replicas, action, prefix))
        if causes:
            logging.warning(
                "Worker %d has waited for %g s to %s, which all workers must "
                "do together: %s. The usual cause is a call in one worker "
                "alone, such as `if chief: ...`, or in another order.",
                replicas.worker,
                AFTER_S,
                action,
                "; ".join(causes),
            )
        ended.wait()
        key_value_store.remove(mine)


def _causes(replicas: Replicas, action: str, prefix: str) -> Iterator[str]:
    """Yields what is known of each worker that this one waits for."""
    if not key_value_store.has_timeouts():
        yield "another one has not come to it"
        return
    for worker in range(replicas.workers):
        if worker == replicas.worker:
            continue
        name = f"worker {worker} ({replicas.task(worker)})"
        try:
            text = key_value_store.receive(
                replicas, f"{prefix}/{worker}", worker, _ANSWER_S
            )
        except key_value_store.Late:
            yield f"{name} has not come to it"
            continue
        if text != action:
            yield f"{name} waits to {text}"
