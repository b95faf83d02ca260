"""Whether other workers still run."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import context

# Seconds within which a worker must answer.
TIMEOUT_S = 2


def is_there(task: str) -> bool:
    """Whether a worker answers; True if it is only too busy to do so in time.

    `task` is TensorFlow's name for the worker.
    """
    service: Any = context.context()
    try:
        service.check_collective_ops_peer_health(task, 1000 * TIMEOUT_S)
    except (tf.errors.UnavailableError, tf.errors.FailedPreconditionError):
        return False
    except tf.errors.OpError:
        pass
    return True
