"""Whether other workers are there."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import context

# Seconds in which a worker has to answer.
TIMEOUT_S = 2


def is_there(task: str) -> bool:
    """Asks a worker for a sign of life.

    Args:
        task: TensorFlow's name for the worker.

    Returns:
        Whether it gives one. Also True if that can't be told, as when it is
        too busy to answer in time.
    """
    service: Any = context.context()
    try:
        service.check_collective_ops_peer_health(task, 1000 * TIMEOUT_S)
    except (tf.errors.UnavailableError, tf.errors.FailedPreconditionError):
        return False
    except tf.errors.OpError:
        pass
    return True
