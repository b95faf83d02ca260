"""The loss scale, as a backward pass knows it.

Under mixed_float16 Keras multiplies the loss by a scale and divides the
variables' gradients by it before they are applied. A table's update happens in
the backward pass, between the two, and must divide by the same scale. Keras
doesn't tell a layer about it. So what `get_scaled_loss` returns goes through a
gradient of our own, which says so to the backward pass that comes by: each
pass has the scale of its own loss, whatever other losses, models and threads
there are.

A loss that was scaled by other means can't be noticed.
"""

from __future__ import annotations

import functools
import weakref
from typing import Any

import tensorflow as tf
import tf_keras

from tfrs_embed import backward_passes, weak_gradients

_AMBIGUOUS = (
    "Losses that different LossScaleOptimizers scaled are differentiated "
    "together, so what the tables' gradients are scaled by can't be known. "
    "Take the gradient of each loss by itself."
)

# Of graphs that are a function's gradient: the optimizer of its loss.
_of_graph: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def current(where: str) -> Any:
    """Returns the `LossScaleOptimizer` that scaled this pass's loss, or None.

    Args:
        where: whose tables are to be updated, for errors.

    Raises:
        ValueError: more than one did.
    """
    passes = backward_passes.here()
    # What a pass calls while it runs has gradients that are scaled alike.
    scales: list[Any] = next((p.scales for p in passes[::-1] if p.scales), [])
    if len(scales) > 1:
        raise ValueError(f"{where}: {_AMBIGUOUS}")
    return scales[0] if scales else None


def install() -> None:
    """Makes Keras's loss scale optimizers note what they do; idempotent."""
    base = tf_keras.mixed_precision.LossScaleOptimizer
    for kind in base.__subclasses__():
        method = kind.__dict__.get("get_scaled_loss")
        if method is not None and not hasattr(method, "notes_scale"):
            kind.get_scaled_loss = _noting(method)


def _noting(method: Any) -> Any:
    @functools.wraps(method)
    def noting(self: Any, loss: Any) -> Any:
        scaled = method(self, loss)
        if callable(scaled):
            return lambda: _marked(scaled(), self)
        return _marked(scaled, self)

    noting.notes_scale = True  # type: ignore[attr-defined]
    return noting


def _marked(loss: tf.Tensor, optimizer: Any) -> tf.Tensor:
    """The same loss, whose gradient says which optimizer scaled it."""

    @weak_gradients.custom_gradient
    def mark(loss: tf.Tensor) -> Any:
        def backward(gradient: tf.Tensor) -> tf.Tensor:
            passes = backward_passes.here()
            if passes:
                passes[-1].scale(optimizer)
                return gradient
            # A function's own gradient, for passes that are not known yet.
            graph = backward_passes.graph()
            if _of_graph.setdefault(graph, optimizer) is not optimizer:
                raise ValueError(_AMBIGUOUS)
            scale = tf.cast(optimizer.loss_scale, tf.float32)
            return backward_passes.set_scale(gradient, scale)

        return tf.identity(loss), backward

    return mark(loss)
