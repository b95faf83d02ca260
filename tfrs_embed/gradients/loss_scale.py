"""The loss scale, as a backward pass knows it.

Under mixed_float16 Keras multiplies the loss by a scale and divides the
variables' gradients by it before they are applied. A table's update happens in
the backward pass, between the two, and must divide by the same scale. Keras
doesn't tell a layer about it. So what `get_scaled_loss` returns, in Keras 3
`scale_loss`, goes through a gradient of our own, which says so to the backward
pass that comes by: each pass has the scale of its own loss, whatever other
losses, models and threads there are.

A loss that was scaled by other means can't be noticed.
"""

from __future__ import annotations

import functools
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import custom_gradients as lifetime
from tfrs_embed.compat import kerases
from tfrs_embed.gradients import flag, passes


@functools.cache
def install(keras: Any) -> None:
    """Makes a Keras's optimizers note what they scale; idempotent.

    Args:
        keras: tf_keras or Keras 3.
    """
    scaling = keras.mixed_precision.LossScaleOptimizer
    if keras.__name__ == kerases.TF_KERAS:
        name, kinds = "get_scaled_loss", scaling.__subclasses__()
    else:
        # There every optimizer can have a fixed factor.
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
    """The same loss, whose gradient says which optimizer scaled it."""
    ended = False

    @lifetime.custom_gradient
    def mark(loss: tf.Tensor) -> Any:
        def backward(gradient: tf.Tensor) -> tf.Tensor:
            if not ended:
                # A ForwardAccumulator's, which runs as soon as it is recorded.
                return gradient
            running = passes.here()
            if running:
                running[-1].scale(optimizer)
                return gradient
            # A function's own gradient, for passes that are not known yet.
            for each in flag.of_graph(loss.graph):
                raise NotImplementedError(
                    f"Layer '{each.layer}': the loss is scaled in a "
                    "tf.function that calls the layer, and the gradient is "
                    "taken outside of it, so what to divide the tables' "
                    "gradients by isn't known. Scale the loss beside the tape."
                )
            return gradient

        return tf.identity(loss), backward

    marked = mark(loss)
    ended = True
    return marked
