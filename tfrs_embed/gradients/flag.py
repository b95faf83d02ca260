"""A variable that tells a function's gradient whether to update tables."""

from __future__ import annotations

import threading
import weakref

import tensorflow as tf

from tfrs_embed.compat.unmirrored import UnmirroredVariable

#: A flag's value before a pass has set it.
UNSAID = -1.0
#: A flag's value during a pass that doesn't ask for the update.
NOT_ASKED = 0.0


class UpdateFlag:
    """Tells a function's gradient, when it runs, whether to update tables.

    The value is `UNSAID`, `NOT_ASKED`, or the scale of the pass's loss, 1 if it
    has none.

    Attributes:
        layer: the layer's name, for errors.
        weight: the scalar weight that stands for the tables.
        variables: one for each local replica, so that none waits for another.
        used: whether a function's gradient reads it.
    """

    def __init__(self, layer: str, weight: tf.Variable, number: int) -> None:
        self.layer = layer
        self.weight = weight
        self.used = False
        with tf.init_scope(), tf.device("CPU:0"):
            self.variables = [
                UnmirroredVariable(
                    UNSAID, trainable=False, name=f"backward_{i}"
                )
                for i in range(number)
            ]
        with _lock:
            _all.add(self)

    def variable(self) -> tf.Variable:
        """The variable of the current replica."""
        context = tf.distribute.get_replica_context()
        if context is None or len(self.variables) == 1:
            return self.variables[0]
        return self.variables[int(context._local_replica_id)]


_all: weakref.WeakSet[UpdateFlag] = weakref.WeakSet()
# Threads add flags at the same time.
_lock = threading.Lock()


def used() -> list[UpdateFlag]:
    """The flags that a function's gradient reads."""
    with _lock:
        return [flag for flag in _all if flag.used]


def of_graph(graph: tf.Graph) -> list[UpdateFlag]:
    """The flags of the layers that a function's graph calls."""
    handles = {id(handle(variable)) for variable in graph.variables}
    with _lock:
        flags = list(_all)
    return [flag for flag in flags if id(handle(flag.weight)) in handles]


def handle(value: object) -> object:
    """A variable's handle on this device, or the value itself."""
    try:
        return getattr(value, "handle", value)
    except ValueError:
        # A mirrored variable has no handle outside of replicas.
        return value
