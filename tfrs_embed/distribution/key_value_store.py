"""Texts that workers send each other, in the coordination service's store."""

from __future__ import annotations

import inspect
import time
from typing import Any

import tensorflow as tf

from tfrs_embed._tensorflow import context
from tfrs_embed.distribution.peers import is_there
from tfrs_embed.distribution.replicas import Replicas

# A worker that is waited for is looked after this often, in seconds, and given
# up when it has not been there so many times.
_INTERVAL_S = 2
_PATIENCE = 3


def send(key: str, text: str) -> None:
    """Leaves a text, under a key that nobody has used before."""
    service: Any = context.context()
    service.set_config_key_value(key, text)


def remove(key: str) -> None:
    """Removes a text, if it is there."""
    service: Any = context.context()
    service.delete_config_key_value(key)


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
        tf.errors.UnavailableError: the worker has ended.
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
                raise TimeoutError(key) from None
        missed = 0 if is_there(replicas.task(worker)) else missed + 1
        if missed == _PATIENCE:
            raise tf.errors.UnavailableError(
                None,
                None,
                f"Worker {worker} ({replicas.task(worker)}) has ended, or "
                "can't be reached, while this one waited for it: its own log "
                "may say why.",
            )
