"""Variables of one device, under any strategy."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import ResourceVariable


class UnmirroredVariable(ResourceVariable):
    """A variable of this device.

    In a strategy's scope `tf.Variable(...)` makes a mirrored variable, and
    waits for all workers.

    Attributes:
        on_change: called after a method of the variable has changed it, with
            the rows that were changed, or None for all; None: nobody asks.
            Operations on the variable's handle don't call it.
        on_read: passed each value that a method of the variable has read, to
            return it; None: nobody asks. `gather` doesn't call it.
    """

    on_change: Callable[[tf.Tensor | None], None] | None = None
    on_read: Callable[[tf.Tensor], tf.Tensor] | None = None


def gather(variable: Any, rows: tf.Tensor) -> tf.Tensor:
    """Returns rows of a variable, [n, ...], without `on_read`."""
    if isinstance(variable, UnmirroredVariable):
        return ResourceVariable.sparse_read(variable, rows)
    return tf.gather(variable, rows)


def _asking(method: str) -> Callable[..., Any]:
    """Returns a variable's method that calls `on_read`."""
    read = getattr(ResourceVariable, method)

    @functools.wraps(read)
    def reading(self: Any, *args: Any, **kwargs: Any) -> Any:
        value = read(self, *args, **kwargs)
        return value if self.on_read is None else self.on_read(value)

    return reading


for _method in ("_read_variable_op", "sparse_read", "gather_nd"):
    setattr(UnmirroredVariable, _method, _asking(_method))


def _telling(method: str) -> Callable[..., Any]:
    """Returns a variable's method that calls `on_change`."""
    change = getattr(ResourceVariable, method)

    @functools.wraps(change)
    def changing(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        result = change(self, value, *args, **kwargs)
        if self.on_change is not None:
            rows = getattr(value, "indices", None)
            self.on_change(rows if method.startswith("scatter_") else None)
        return result

    return changing


for _method in (
    *("assign", "assign_add", "assign_sub", "batch_scatter_update"),
    *(f"scatter_{n}" for n in ("add", "div", "max", "min", "mul", "sub")),
    *("scatter_update", "scatter_nd_add", "scatter_nd_sub"),
    *("scatter_nd_update", "scatter_nd_max", "scatter_nd_min"),
):
    setattr(UnmirroredVariable, _method, _telling(_method))


def make_variable(
    value: tf.Tensor,
    name: str,
    shape: Any = None,
    kind: type[UnmirroredVariable] = UnmirroredVariable,
) -> tf.Variable:
    """Makes a variable of this device alone: no strategy mirrors it."""
    # TensorFlow refuses other names in a SavedModel's graph.
    name = re.sub(
        r"[^A-Za-z0-9_.\\/-]", lambda match: f">{ord(match[0]):X}", name
    )
    # Keras checks that it was made in the strategy's scope.
    strategy = (
        tf.distribute.get_strategy() if tf.distribute.has_strategy() else None
    )
    return kind(
        value,
        trainable=False,
        name=name if re.match("[A-Za-z0-9.]", name) else f".{name}",
        shape=shape,
        distribute_strategy=strategy,
    )
