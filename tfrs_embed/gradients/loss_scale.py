"""Divides tables' gradients by the loss scale.

Under mixed_float16 Keras multiplies the loss by a scale and divides the
variables' gradients by it before they are applied. A table's update happens in
the backward pass, between the two, and must divide by the same scale, which
Keras doesn't tell layers. So the result of `get_scaled_loss`, in Keras 3 of
`scale_loss`, gets a custom gradient, which tells the running pass the
optimizer. Each pass knows the scale of its own loss, with any number of losses,
models and threads.

A loss that was scaled by other means is not noticed.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import custom_gradients, keras_versions
from tfrs_embed.gradients import passes


@functools.cache
def install(keras: Any) -> None:
    """Marks the losses that a Keras's optimizers scale; idempotent."""
    scaling = keras.mixed_precision.LossScaleOptimizer
    if keras.__name__ == keras_versions.TF_KERAS:
        name, kinds = "get_scaled_loss", scaling.__subclasses__()
    else:
        # In Keras 3 every optimizer can have a fixed loss scale.
        name = "scale_loss"
        kinds = [scaling, *keras.optimizers.Optimizer.__mro__]
    for kind in kinds:
        method = kind.__dict__.get(name)
        if method is not None:
            setattr(kind, name, _noting(method))


def _noting(method: Any) -> Any:
    @functools.wraps(method)
    def noting(self: Any, loss: Any) -> Any:
        scaled = method(self, loss)
        if scaled is loss:
            return loss
        if callable(scaled):
            return lambda: _marked(scaled(), self)
        return _marked(scaled, self)

    return noting


def _marked(loss: tf.Tensor, optimizer: Any) -> tf.Tensor:
    """Returns the loss with a gradient that tells passes its optimizer."""
    ended = False
    forward = passes.graph()

    @custom_gradients.custom_gradient
    def mark(loss: tf.Tensor) -> Any:
        def backward(gradient: tf.Tensor) -> tf.Tensor:
            if not ended:
                # A ForwardAccumulator calls this while it records.
                return gradient
            running = passes.current_passes()
            if running:
                running[-1].scale(optimizer)
            elif forward != "eager":
                _refuse_layers(forward)
            return gradient

        return tf.identity(loss), backward

    marked = mark(loss)
    ended = True
    return marked


def _refuse_layers(graph: Any) -> None:
    """Raises a NotImplementedError if a function calls a layer with tables.

    The gradient of a function that scales a loss doesn't know the pass.
    """
    for layer in passes.layers():
        if any(passes.same(layer.trigger, v) for v in graph.variables):
            raise NotImplementedError(
                f"Layer '{layer.name}' is called in a tf.function that scales "
                "the loss, and the gradient is taken outside of it. Scale the "
                "loss in the function that takes the gradient."
            )
