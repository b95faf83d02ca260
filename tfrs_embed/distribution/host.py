"""What a replica's accelerator leaves to its host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.tpu import tpu_replication


def on_host(function: Callable[..., Any], *args: Any) -> Any:
    """Runs a function on the host of a replica's TPU.

    Args:
        function: what to run.
        *args: its arguments.

    Returns:
        What it returns. Outside of a TPUStrategy's replica it is just called.
    """
    if tf.executing_eagerly() or tf.distribute.in_cross_replica_context():
        return function(*args)
    if not is_tpu(tf.distribute.get_strategy()):
        return function(*args)
    return tpu_replication.outside_compilation(function, *args)


def is_tpu(strategy: tf.distribute.Strategy) -> bool:
    """Tells a TPUStrategy."""
    return isinstance(
        strategy,
        (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy),
    )
