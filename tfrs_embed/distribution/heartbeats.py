"""The time after which a worker that gives no sign of life is given up."""

from __future__ import annotations

import functools
import math
from typing import Any

from tfrs_embed.compat.private_tensorflow import context

# TensorFlow's own choice, in seconds.
_DEFAULT_S = 10.0


def timeout() -> float:
    """The seconds after which a silent worker counts as dead."""
    service: Any = context.context()
    config = service.coordination_service
    chosen = 0 if config is None else config.heartbeat_timeout_in_ms
    return chosen / 1000 if chosen else _DEFAULT_S


def set_heartbeat_timeout(seconds: float) -> None:
    """Sets after how long a silent worker ends the job.

    Workers of a `MultiWorkerMirroredStrategy` send each other heartbeats. One
    from which none has come for this long counts as dead, and all others end
    with an error that names it. TensorFlow's own choice is some 10 seconds,
    which is too short where a worker may stand still for longer, as virtual
    machines that are moved do.

    Call it in all workers, with one number, before the strategy is made.

    Example:
        >>> tfrs_embed.set_heartbeat_timeout(60)
        >>> strategy = tf.distribute.get_strategy()  # Or MultiWorkerMirrored...

    Args:
        seconds: the time, above 0.

    Returns:
        Nothing.

    Raises:
        ValueError: it is no such number.
        RuntimeError: this process has made its strategy already.
    """
    if (
        not isinstance(seconds, (int, float))
        or isinstance(seconds, bool)
        or not math.isfinite(seconds)
        or seconds <= 0
    ):
        raise ValueError(
            "set_heartbeat_timeout takes a number of seconds above 0, got "
            f"{seconds!r}."
        )
    service: Any = context.context()
    if service.coordination_service is not None:
        raise RuntimeError(
            "set_heartbeat_timeout must be called before the strategy is made: "
            "its workers exchange heartbeats already."
        )
    # The strategy configures the service as it is made, and leaves this out.
    configure = type(service).configure_coordination_service
    service.configure_coordination_service = functools.partial(
        configure,
        service,
        heartbeat_timeout_in_ms=max(1, round(1000 * float(seconds))),
    )
