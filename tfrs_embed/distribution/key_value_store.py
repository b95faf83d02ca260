"""Texts that workers send each other, in the coordination service's store.

The service is a part of the first worker's process.
"""

from __future__ import annotations

import inspect
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import Any

import tensorflow as tf

from tfrs_embed._tensorflow import context
from tfrs_embed.distribution import heartbeats
from tfrs_embed.distribution.peers import answers
from tfrs_embed.distribution.replicas import Replicas

# A worker that is waited for is looked after this often, in seconds, and given
# up when it has not been there so many times.
_INTERVAL_S = 2
_PATIENCE = 3


def send(key: str, text: str) -> None:
    """Leaves a text, under a key that nobody has used before.

    Raises:
        tf.errors.UnavailableError: the service doesn't answer.
    """
    service: Any = context.context()
    _ask(lambda: service.set_config_key_value(key, text))


def remove(key: str) -> None:
    """Removes a text, if it is there.

    Raises:
        tf.errors.UnavailableError: the service doesn't answer.
    """
    service: Any = context.context()
    _ask(lambda: service.delete_config_key_value(key))


def _ask(call: Callable[[], None]) -> None:
    """Calls the service. TensorFlow would wait for its answer forever."""
    done: futures.Future[None] = futures.Future()

    def run() -> None:
        try:
            call()
            done.set_result(None)
        except Exception as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    seconds = heartbeats.timeout()
    try:
        done.result(seconds)
    except futures.TimeoutError:
        raise _unavailable("Worker 0", seconds) from None


def _unavailable(worker: str, seconds: float) -> tf.errors.UnavailableError:
    return tf.errors.UnavailableError(
        None,
        None,
        f"{worker} has not answered for {seconds:g} s, while this one waited "
        "for it: it stands still, or can't be reached. "
        "tfrs_embed.set_heartbeat_timeout sets that time.",
    )


def has_timeouts() -> bool:
    """Whether `receive` waits no longer than told, as from TF 2.19 on."""
    get = inspect.signature(context.Context.get_config_key_value)
    return "timeout_in_ms" in get.parameters


def receive(replicas: Replicas, key: str, worker: int, timeout: float) -> str:
    """Waits for a text.

    Args:
        replicas: the workers' replicas.
        key: what the text is left under.
        worker: the worker that leaves it.
        timeout: seconds to wait.

    Returns:
        The text.

    Raises:
        TimeoutError: it was not left in this time.
        tf.errors.UnavailableError: the worker has ended, or it or the service
            stands still.
    """
    service: Any = context.context()
    end, missed = time.monotonic() + timeout, 0
    seconds = heartbeats.timeout()
    # When each was last known not to stand still.
    heard = dict.fromkeys({worker, 0} - {replicas.worker}, time.monotonic())
    while True:
        wait = min(_INTERVAL_S, max(0.001, end - time.monotonic()))
        try:
            return service.get_config_key_value(key, int(1000 * wait))
        except TypeError:  # TF before 2.19 has no timeout here.
            return service.get_config_key_value(key)
        except tf.errors.DeadlineExceededError:
            if time.monotonic() >= end:
                raise TimeoutError(key) from None
        for other, last in heard.items():
            name = f"Worker {other} ({replicas.task(other)})"
            answered = answers(replicas.task(other))
            if answered is not None:
                heard[other] = time.monotonic()
            elif time.monotonic() - last > seconds:
                raise _unavailable(name, seconds)
            if other == worker:
                missed = missed + 1 if answered is False else 0
        if missed == _PATIENCE:
            raise tf.errors.UnavailableError(
                None,
                None,
                f"Worker {worker} ({replicas.task(worker)}) has ended, or "
                "can't be reached, while this one waited for it: its own log "
                "may say why.",
            )
