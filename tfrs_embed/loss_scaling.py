"""Knowing the loss scale in a backward pass.

Under mixed_float16 Keras multiplies the loss by a scale and divides the
variables' gradients by it before they are applied. A table's update happens in
the backward pass, between the two, and must divide by the same scale. Keras
doesn't tell a layer about it, so this module notes, per thread and graph, the
`LossScaleOptimizer` whose `get_scaled_loss` was called last, until its
`get_unscaled_gradients` or `apply_gradients` ends the step.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

import tensorflow as tf
import tf_keras

_step = threading.local()


def current() -> Any:
    """Returns the `LossScaleOptimizer` that scaled this step's loss, or None.

    A loss that was scaled by other means can't be noticed.
    """
    optimizer, graph = getattr(_step, "scaled", (None, None))
    return optimizer if graph is _graph() else None


def install() -> None:
    """Makes Keras's loss scale optimizers note what they do; idempotent."""
    base = tf_keras.mixed_precision.LossScaleOptimizer
    for kind in base.__subclasses__():
        for name, scales in (
            ("get_scaled_loss", True),
            ("get_unscaled_gradients", False),
            ("apply_gradients", False),
        ):
            method = kind.__dict__.get(name)
            if method is not None and not hasattr(method, "_notes_loss_scale"):
                setattr(kind, name, _noting(method, scales))


def _noting(method: Any, scales: bool) -> Any:
    @functools.wraps(method)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        _step.scaled = (self, _graph()) if scales else (None, None)
        return method(self, *args, **kwargs)

    noting._notes_loss_scale = True  # type: ignore[attr-defined]
    return noting


def _graph() -> Any:
    """The graph being traced; a constant when executing eagerly."""
    if tf.executing_eagerly():
        return "eager"
    return tf.compat.v1.get_default_graph()
