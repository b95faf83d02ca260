"""The clock of tables whose eviction rules are given in time.

Times are in microseconds since 1970. Tests and simulations set another clock:
see `testing.simulated_clock`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

_MICROSECONDS = 1_000_000

#: Returns the seconds since 1970; None: the machine's clock does.
simulated: Callable[[], float] | None = None


def now() -> int:
    """Returns the time now."""
    seconds = time.time() if simulated is None else simulated()
    return int(seconds * _MICROSECONDS)


def moment(by_time: bool, step: Any) -> int:
    """Returns the time now, or a variable's number of steps."""
    return now() if by_time else int(np.asarray(step))


def read(step: tf.Tensor) -> tf.Tensor:
    """Returns the time at which the operation runs, a scalar int64."""

    def call(step: np.ndarray) -> np.int64:
        del step  # An input, so that the call is no constant.
        return np.int64(now())

    with tf.device("CPU:0"):
        # Not tf.timestamp: functions run it, and all stateful operations
        # without resources, in the order of tracing. One replica's would wait
        # for a check that waits for the other replica.
        found = tf.numpy_function(call, [step], tf.int64, stateful=False)
        return tf.ensure_shape(found, [])
