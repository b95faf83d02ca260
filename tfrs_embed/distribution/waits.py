"""A warning where a worker waits long for others, between training steps.

Workers save and read sharded tables together, and build the same layers. If one
does so alone, the others' parts never come, and TensorFlow's collectives wait
without a word.
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


@contextlib.contextmanager
def together(replicas: Replicas, action: str) -> Iterator[None]:
    """Runs a collective between steps; reports a long wait for other workers.

    All workers must come by in the same order.

    Args:
        replicas: the workers' replicas.
        action: what all workers do, "read 'movies/parameters'".

    Yields:
        Nothing.
    """
    if replicas.workers == 1:
        yield
        return
    number, prefix = replicas.count_wait(), f"tfrs_embed/{replicas.group}/wait"
    me = replicas.worker
    # Where the service has ended, the collective's error says why.
    with contextlib.suppress(tf.errors.OpError):
        key_value_store.send(f"{prefix}/{number}/{me}", action)
        # The last collective has ended, so all workers had come to it.
        key_value_store.remove(f"{prefix}/{number - 1}/{me}")
    with reported(replicas, action, f"{prefix}/{number}", with_actions=True):
        yield


@contextlib.contextmanager
def reported(
    replicas: Replicas, action: str, prefix: str, with_actions: bool = False
) -> Iterator[None]:
    """Logs a warning, once, if other workers don't come for `AFTER_S` seconds.

    Args:
        replicas: the workers' replicas.
        action: what all workers do, "read 'movies/parameters'".
        prefix: each worker that has come has left a text under
            `<prefix>/<worker>` in the key-value store.
        with_actions: whether these texts are the workers' actions.

    Yields:
        Nothing.
    """
    timer = threading.Timer(
        AFTER_S, _report, (replicas, action, prefix, with_actions)
    )
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _report(
    replicas: Replicas, action: str, prefix: str, with_actions: bool
) -> None:
    try:
        found = list(_causes(replicas, action, prefix, with_actions))
    except tf.errors.OpError:
        return  # The service has ended: the wait ends with an error.
    if found:
        logging.warning(
            "Worker %d has waited for %g s to %s, which all workers must do "
            "together: %s. The usual cause is a call in one worker alone, such "
            "as `if chief: ...`, or in another order.",
            replicas.worker,
            AFTER_S,
            action,
            "; ".join(found),
        )


def _causes(
    replicas: Replicas, action: str, prefix: str, with_actions: bool
) -> Iterator[str]:
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
                replicas, f"{prefix}/{worker}", worker, 0
            )
        except TimeoutError:
            yield f"{name} has not come to it"
            continue
        if with_actions and text != action:
            yield f"{name} waits to {text}"
