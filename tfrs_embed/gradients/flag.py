"""A variable that tells a function's gradient whether to update tables."""

from __future__ import annotations

import threading
import weakref

import tensorflow as tf

from tfrs_embed.compat.unmirrored import UnmirroredVariable

#: A flag's value while no pass has told it whether it asks for the update.
UNSAID = -1.0
#: A flag's value while a pass runs that does not ask for the update.
NOT_ASKED = 0.0


class UpdateFlag:
    """Tells a function's gradient, when it runs, what the running pass asks.

    The value is `UNSAID`, `NOT_ASKED`, or the scale of the pass's loss, 1 if it
    has none.

    Args:
        layer: the layer's name, for errors.
        weight: the weight whose gradient asks for the update.
        number: the number of local replicas.

    Attributes:
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
# Other threads add to it.
_lock = threading.Lock()


def used() -> list[UpdateFlag]:
    """The flags that a function's gradient reads."""
    with _lock:
        return [flag for flag in _all if flag.used]


def of_graph(graph: tf.Graph) -> list[UpdateFlag]:
    """The flags of the layers that a function calls.

    Args:
        graph: the function's graph.
    """
    handles = {id(handle(variable)) for variable in graph.variables}
    with _lock:
        flags = list(_all)
    return [flag for flag in flags if id(handle(flag.weight)) in handles]


def handle(value: object) -> object:
    """A variable's handle, here; a tensor, or what has no handle, as it is."""
    try:
        return getattr(value, "handle", value)
    except ValueError:
        # A mirrored variable has none outside of its replicas.
        return value
