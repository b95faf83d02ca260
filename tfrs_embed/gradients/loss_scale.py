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
import weakref
from typing import Any

import tensorflow as tf

from tfrs_embed import kerases
from tfrs_embed.gradients import flag, lifetime, passes

# The attribute of an optimizer of Keras 3 that holds its scale.
_SCALE = "_tfrs_embed_scale"

# Of graphs that are a function's gradient: the optimizer of its loss.
_of_graph: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


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
        if method is not None and not hasattr(method, "notes_scale"):
            setattr(kind, name, _noting(method))


def _noting(method: Any) -> Any:
    @functools.wraps(method)
    def noting(self: Any, loss: Any) -> Any:
        scaled = method(self, loss)
        if scaled is loss:
            return loss
        of_keras_3 = kerases.of(self).__name__ == kerases.KERAS_3
        scale = _ScaleOfKeras3.of(self) if of_keras_3 else self
        if callable(scaled):
            return lambda: _marked(scaled(), scale)
        return _marked(scaled, scale)

    noting.notes_scale = True  # type: ignore[attr-defined]
    return noting


class _ScaleOfKeras3:
    """The scale of a Keras 3 optimizer, by tf_keras's names.

    Args:
        optimizer: the optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    @classmethod
    def of(cls, optimizer: Any) -> _ScaleOfKeras3:
        """The optimizer's, one object for each."""
        if not hasattr(optimizer, _SCALE):
            object.__setattr__(optimizer, _SCALE, cls(optimizer))
        scale: _ScaleOfKeras3 = getattr(optimizer, _SCALE)
        return scale

    @property
    def dynamic(self) -> bool:
        """Whether it changes, and an infinite gradient lowers it."""
        return hasattr(self._optimizer, "initial_scale")

    @property
    def loss_scale(self) -> Any:
        """The factor."""
        optimizer = self._optimizer
        if not self.dynamic:
            return optimizer.loss_scale_factor
        if optimizer.built:
            return optimizer.dynamic_scale.value
        return optimizer.initial_scale


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
            if _of_graph.setdefault(passes.graph(), optimizer) is not optimizer:
                raise ValueError(passes.AMBIGUOUS)
            return _set_scale(gradient, optimizer, loss.graph)

        return tf.identity(loss), backward

    marked = mark(loss)
    ended = True
    return marked


def _set_scale(gradient: tf.Tensor, optimizer: Any, graph: Any) -> tf.Tensor:
    """Sets the loss scale in a function's gradient, until the pass ends.

    Args:
        gradient: the gradient that the function's gradient begins with.
        optimizer: scales the loss in the function.
        graph: the function's graph.

    Returns:
        The same gradient. It is computed after the scale was set.
    """
    scale = tf.cast(optimizer.loss_scale, tf.float32)
    for each in flag.of_graph(graph):
        variable = each.variable()
        # A pass that asks for no update, or says nothing, stays.
        value = tf.where(variable > flag.NOT_ASKED, scale, variable)
        assigned = variable.assign(value, read_value=False)
        with tf.control_dependencies([assigned]):
            # Not a constant: TensorFlow's graph optimizer may pass constants to
            # functions without waiting for their control inputs.
            read = variable.read_value()
            one = tf.where(read > flag.NOT_ASKED, read / scale, 1.0)
        gradient *= tf.cast(one, gradient.dtype)
    return gradient
