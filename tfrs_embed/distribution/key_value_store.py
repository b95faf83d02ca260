"""Texts that workers exchange in the coordination service's store.

The service runs in the first worker's process.
"""

from __future__ import annotations

import inspect
import re
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any, TypeVar

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import context
from tfrs_embed.distribution import heartbeats
from tfrs_embed.distribution.peer_health import is_there
from tfrs_embed.distribution.replicas import Replicas

T = TypeVar("T")

# Seconds between checks of a worker that is waited for, and how many checks it
# may fail.
_INTERVAL_S = 2
_PATIENCE = 3


class WaitTimeoutError(TimeoutError):
    """A worker has not sent its text in time."""

    def __init__(self, worker: int) -> None:
        super().__init__(worker)
        self.worker = worker


def send(key: str, text: str) -> None:
    """Stores a text under a new key.

    Raises:
        tf.errors.UnavailableError: the service does not answer.
    """
    service: Any = context.context()
    _ask(lambda: service.set_config_key_value(key, text))


def remove(key: str) -> None:
    """Removes a text, if it exists; raises as `send` does."""
    service: Any = context.context()
    _ask(lambda: service.delete_config_key_value(key))


def _ask(call: Callable[[], T]) -> T:
    """Calls the service, with a timeout that TensorFlow lacks."""
    done: futures.Future[T] = futures.Future()

    def run() -> None:
        try:
            done.set_result(call())
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    seconds = heartbeats.timeout()
    try:
        return done.result(seconds)
    except futures.TimeoutError:
        raise tf.errors.UnavailableError(
            None,
            None,
            f"Worker 0, which has the coordination service, has not answered "
            f"for {seconds:g} s: it stands still, or can't be reached. "
            "tfrs_embed.set_heartbeat_timeout sets that time.",
        ) from None


def _require_alive(replicas: Replicas, worker: int) -> None:
    """Raises UnavailableError if a worker counts as dead."""
    task = replicas.task(worker)
    job, number = re.findall("/(?:job|task):([^/]*)", task)
    service: Any = context.context()
    # The job's first tasks, up to this one.
    jobs = [(job, int(number) + 1)]
    *_, error = _ask(lambda: service.get_task_states(jobs))
    if error is not None:
        raise tf.errors.UnavailableError(
            None,
            None,
            f"Worker {worker} ({task}) counts as dead, while this one waited "
            f"for it: {error}",
        )


def has_timeouts() -> bool:
    """Whether `receive` respects its timeout, as from TF 2.19 on."""
    get = inspect.signature(context.Context.get_config_key_value)
    return "timeout_in_ms" in get.parameters


def receive(replicas: Replicas, key: str, worker: int, timeout: float) -> str:
    """Waits up to `timeout` seconds for the text that a worker sends.

    Raises:
        WaitTimeoutError: the text was not sent in this time.
        tf.errors.UnavailableError: the worker has ended; or it, or the service,
            does not answer.
    """
    service: Any = context.context()
    end, missed = time.monotonic() + timeout, 0
    while True:
        wait = min(_INTERVAL_S, max(0.001, end - time.monotonic()))
        try:
            return service.get_config_key_value(key, int(1000 * wait))
        except TypeError:  # TF before 2.19 has no timeout here.
            return service.get_config_key_value(key)
        except tf.errors.DeadlineExceededError:
            if time.monotonic() >= end:
                raise WaitTimeoutError(worker) from None
        _require_alive(replicas, worker)
        missed = 0 if is_there(replicas.task(worker)) else missed + 1
        if missed == _PATIENCE:
            raise tf.errors.UnavailableError(
                None,
                None,
                f"Worker {worker} ({replicas.task(worker)}) has ended, or "
                "can't be reached, while this one waited for it: its own log "
                "may say why.",
            )
