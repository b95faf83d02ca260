"""The clock of tables whose eviction rules are given in time.

Times are in microseconds since 1970. Tests and simulations set another clock:
see `testing.simulated_clock`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import tensorflow as tf

_MICROSECONDS = 1_000_000

#: Returns the seconds since 1970; None: the machine's clock does.
simulated: Callable[[], float] | None = None


def now() -> int:
    """Returns the time now."""
    seconds = time.time() if simulated is None else simulated()
    return int(seconds * _MICROSECONDS)


def read() -> tf.Tensor:
    """Returns the time at which the operation runs, a scalar int64."""
    with tf.device("CPU:0"):
        if simulated is None:
            seconds = tf.timestamp()
            return tf.cast(seconds * _MICROSECONDS, tf.int64)
        # The clock may be set anew while the graph lives.
        found = tf.numpy_function(lambda: np.int64(now()), [], tf.int64)
        return tf.ensure_shape(found, [])
