"""Whether other workers are there."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed._tensorflow import context

# Seconds in which a worker has to answer.
TIMEOUT_S = 2


def answers(task: str) -> bool | None:
    """Asks a worker for a sign of life.

    Args:
        task: TensorFlow's name for the worker.

    Returns:
        True: it gives one, or that can't be told. False: it has ended. None: it
        has not answered in time; it is busy, or stands still.
    """
    service: Any = context.context()
    try:
        service.check_collective_ops_peer_health(task, 1000 * TIMEOUT_S)
    except (tf.errors.UnavailableError, tf.errors.FailedPreconditionError):
        return False
    except tf.errors.DeadlineExceededError:
        return None
    except tf.errors.OpError:
        pass
    return True


def is_there(task: str) -> bool:
    """Whether a worker has not ended, as far as can be told.

    Args:
        task: TensorFlow's name for the worker.
    """
    return answers(task) is not False
