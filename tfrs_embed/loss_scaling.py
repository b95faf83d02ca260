"""Knowing the loss scale in a backward pass.

Under mixed_float16 Keras multiplies the loss by a scale and divides the
variables' gradients by it before they are applied. A table's update happens in
the backward pass, between the two, and must divide by the same scale. Keras
doesn't tell a layer about it, so this module notes what its
`LossScaleOptimizer`s do: a step's loss is scaled from `get_scaled_loss` until
`get_unscaled_gradients` or `apply_gradients`.

It is noted twice. A note per thread and graph costs a step nothing, and serves
where the backward pass is traced between the two calls, as usual. Where the
forward pass is a `tf.function` of its own, its backward pass is traced before
either, and has to read a variable when it runs.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import tensorflow as tf
import tf_keras
from tensorflow.python.ops.resource_variable_ops import ResourceVariable

_step = threading.local()
_in_effect: list[tf.Variable] = []


def current() -> Any:
    """Returns the `LossScaleOptimizer` that scaled this step's loss, or None.

    A loss that was scaled by other means can't be noticed.
    """
    optimizer, where = getattr(_step, "scaled", (None, None))
    return optimizer if where is graph() else None


def in_effect() -> tf.Variable:
    """Returns the variable that holds the scale, 1 for an unscaled loss."""
    return _in_effect[0]


def graph() -> Any:
    """Returns the graph being traced; a constant when executing eagerly."""
    if tf.executing_eagerly():
        return "eager"
    return tf.compat.v1.get_default_graph()


def install() -> None:
    """Makes Keras's loss scale optimizers note what they do; idempotent."""
    if _in_effect:
        return
    with tf.init_scope():
        # The class itself, so that no strategy mirrors it.
        _in_effect.append(
            ResourceVariable(1.0, trainable=False, name="loss_scale")
        )
    base = tf_keras.mixed_precision.LossScaleOptimizer
    for kind in base.__subclasses__():
        for name, scales in (
            ("get_scaled_loss", True),
            ("get_unscaled_gradients", False),
            ("apply_gradients", False),
        ):
            if name in kind.__dict__:
                setattr(kind, name, _noting(kind.__dict__[name], scales))


def _noting(method: Any, scales: bool) -> Any:
    @functools.wraps(method)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        _step.scaled = (self, graph()) if scales else (None, None)
        scale = tf.cast(self.loss_scale, tf.float32) if scales else 1.0
        in_effect().assign(scale)
        return method(self, *args, **kwargs)

    return noting
