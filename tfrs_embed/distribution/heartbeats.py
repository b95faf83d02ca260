"""The time after which a worker without heartbeats counts as dead."""

from __future__ import annotations

import functools
from typing import Any

from tfrs_embed.compat import arguments
from tfrs_embed.compat.private_tensorflow import context

# TensorFlow's default.
_DEFAULT_S = 10.0


def timeout() -> float:
    """Returns the seconds after which a silent worker counts as dead."""
    service: Any = context.context()
    config = service.coordination_service
    chosen = 0 if config is None else config.heartbeat_timeout_in_ms
    return chosen / 1000 if chosen else _DEFAULT_S


def set_heartbeat_timeout(seconds: float) -> None:
    """Sets after how many seconds without heartbeats a worker counts as dead.

    Workers of a `MultiWorkerMirroredStrategy` send each other heartbeats. A
    worker that sends none for this time counts as dead, and all others end with
    an error that names it. TensorFlow's default is about 10 seconds, too short
    for workers that may pause longer, for example virtual machines that are
    moved.

    Call it in all workers, with one number, before the strategy is made.

    Example:
        >>> tfrs_embed.set_heartbeat_timeout(60)
        >>> strategy = tf.distribute.get_strategy()  # Or MultiWorkerMirrored...

    Args:
        seconds: the time, above 0.

    Returns:
        Nothing.

    Raises:
        TypeError: seconds is not a number.
        ValueError: seconds is not finite and above 0.
        RuntimeError: this process has already made its strategy.
    """
    seconds = arguments.number(seconds, "set_heartbeat_timeout's seconds")
    service: Any = context.context()
    if service.coordination_service is not None:
        raise RuntimeError(
            "set_heartbeat_timeout must be called before the strategy is made: "
            "its workers exchange heartbeats already."
        )
    # The strategy configures the service without a timeout when it is made.
    configure = type(service).configure_coordination_service
    service.configure_coordination_service = functools.partial(
        configure,
        service,
        heartbeat_timeout_in_ms=max(1, round(1000 * seconds)),
    )
