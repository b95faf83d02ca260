"""tf_keras and Keras 3, of which a program may have one, or both.

Layers are of the one or the other, and import it; nothing else does. What is
given to them, an initializer or an optimizer, may be of either.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import tensorflow as tf

#: The packages' names.
TF_KERAS = "tf_keras"
KERAS_3 = "keras"

_NAMES = (TF_KERAS, KERAS_3)
#: The module with this library's layers of Keras 3.
_LAYERS_OF_KERAS_3 = "tfrs_embed.layers.keras3"


def loaded() -> list[Any]:
    """The Kerases that the program has imported."""
    return [sys.modules[name] for name in _NAMES if name in sys.modules]


def of(value: Any) -> Any:
    """The Keras that has a value's class, or a base of it; None: neither."""
    for kind in type(value).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in _NAMES and package in sys.modules:
            return sys.modules[package]
    return None


def named(name: str) -> Any:
    """The Keras of a package's name.

    Raises:
        ValueError: there is no such.
    """
    if name not in _NAMES:
        raise ValueError(f"A Keras is one of {list(_NAMES)}, got {name!r}.")
    return importlib.import_module(name)


def default() -> Any:
    """The Keras of names and dicts that are given where no layer is known.

    Keras 3 in a program that has this library's layers of Keras 3 and hasn't
    tf_keras, else tf_keras.
    """
    if TF_KERAS not in sys.modules and _LAYERS_OF_KERAS_3 in sys.modules:
        return importlib.import_module(KERAS_3)
    return importlib.import_module(TF_KERAS)


def is_initializer(value: Any) -> bool:
    """Whether a value is an initializer of a Keras."""
    keras = of(value)
    return keras is not None and isinstance(
        value, keras.initializers.Initializer
    )


def variable(value: Any) -> Any:
    """TensorFlow's variable of one of Keras 3's; anything else as it is."""
    keras = of(value)
    if keras is not None and keras.__name__ == KERAS_3:
        return getattr(value, "value", value)
    return value


def adapts_scale(optimizer: Any) -> bool:
    """Whether an optimizer's loss scale changes; infinite gradients lower it.

    Args:
        optimizer: a LossScaleOptimizer, or one of Keras 3 with a fixed scale.
    """
    if of(optimizer).__name__ == TF_KERAS:
        return bool(optimizer.dynamic)
    return hasattr(optimizer, "initial_scale")


def loss_scale(optimizer: Any) -> Any:
    """The factor on the losses of an optimizer; see `adapts_scale`."""
    if of(optimizer).__name__ == TF_KERAS:
        return optimizer.loss_scale
    if not adapts_scale(optimizer):
        return optimizer.loss_scale_factor
    if optimizer.built:
        return optimizer.dynamic_scale.value
    return optimizer.initial_scale


def spec(symbolic: Any) -> tf.TypeSpec:
    """The spec of a symbolic tensor of Keras 3, by the tensor's name."""
    shape, dtype = symbolic.shape, tf.as_dtype(symbolic.dtype)
    if symbolic.sparse:
        return tf.SparseTensorSpec(shape, dtype)
    if symbolic.ragged:
        return tf.RaggedTensorSpec(shape, dtype, symbolic.ragged_rank or 1)
    return tf.TensorSpec(shape, dtype, symbolic.name)


class Hooks:
    """A callback that either Keras takes, and that does nothing."""

    # Neither Keras shall wait for the step's logs for its sake.
    async_safe = True
    _supports_tf_logs = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("on_", "set_", "_implements_")):
            return _nothing
        raise AttributeError(name)

    def _implements_train_batch_hooks(self) -> bool:
        return True


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass
