"""tf_keras and Keras 3; a program may use one of them, or both.

Only layers import a Keras. Initializers and optimizers may be of either.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import tensorflow as tf

#: The packages' names.
TF_KERAS = "tf_keras"
KERAS_3 = "keras"

#: The names of both.
NAMES = (TF_KERAS, KERAS_3)
# The package of layers in files.
_PACKAGE = "tfrs_embed"
# What layers of Keras 3 import.
_WITH_KERAS_3 = f"{__package__}.private_keras_3"


def loaded() -> list[Any]:
    """Returns the versions of Keras that the program has imported."""
    return [sys.modules[name] for name in NAMES if name in sys.modules]


def keras_of(value: Any) -> Any:
    """Returns the Keras of a value's class or a base of it, or None."""
    return keras_of_class(type(value))


def keras_of_class(cls: type) -> Any:
    """Returns the Keras of a class or a base of it, or None."""
    for kind in cls.__mro__:
        package = kind.__module__.partition(".")[0]
        if package in NAMES and package in sys.modules:
            return sys.modules[package]
    return None


def named(name: str) -> Any:
    """Imports the Keras of a package's name; a ValueError for other names."""
    if name not in NAMES:
        raise ValueError(f"A Keras is one of {list(NAMES)}, got {name!r}.")
    return importlib.import_module(name)


def default() -> Any:
    """Returns the Keras for names and dicts without a known layer.

    It is Keras 3 in a program that has this library's layers of Keras 3 and not
    tf_keras, else tf_keras.
    """
    if TF_KERAS not in sys.modules and _WITH_KERAS_3 in sys.modules:
        return importlib.import_module(KERAS_3)
    return importlib.import_module(TF_KERAS)


def register(keras: Any) -> Any:
    """Returns the decorator that registers a layer of this library."""

    def decorate(layer: Any) -> Any:
        # tf_keras refuses to register a name twice.
        keras.saving.get_custom_objects().pop(f"{_PACKAGE}>{layer.__name__}", 0)
        made = keras.saving.register_keras_serializable(_PACKAGE)
        return made(layer)

    return decorate


def is_initializer(value: Any) -> bool:
    """Whether a value is an initializer of a Keras."""
    keras = keras_of(value)
    return keras is not None and isinstance(
        value, keras.initializers.Initializer
    )


def variable(value: Any) -> Any:
    """Returns a Keras 3 variable's TensorFlow variable; other values as is."""
    keras = keras_of(value)
    if keras is not None and keras.__name__ == KERAS_3:
        return getattr(value, "value", value)
    return value


def adapts_scale(optimizer: Any) -> bool:
    """Whether a LossScaleOptimizer, or one of Keras 3's, adapts its scale."""
    if keras_of(optimizer).__name__ == TF_KERAS:
        return bool(optimizer.dynamic)
    return hasattr(optimizer, "initial_scale")


def loss_scale(optimizer: Any) -> Any:
    """Returns the factor on an optimizer's losses; see `adapts_scale`."""
    if keras_of(optimizer).__name__ == TF_KERAS:
        return optimizer.loss_scale
    if not adapts_scale(optimizer):
        return optimizer.loss_scale_factor
    if optimizer.built:
        return optimizer.dynamic_scale.value
    return optimizer.initial_scale


def spec(symbolic: Any) -> tf.TypeSpec:
    """Returns the spec of a symbolic tensor of Keras 3, with its name."""
    shape, dtype = symbolic.shape, tf.as_dtype(symbolic.dtype)
    if symbolic.sparse:
        return tf.SparseTensorSpec(shape, dtype)
    if symbolic.ragged:
        return tf.RaggedTensorSpec(shape, dtype, symbolic.ragged_rank or 1)
    return tf.TensorSpec(shape, dtype, symbolic.name)


class PlainCallback:
    """A callback of either Keras without any effect.

    Keras sets the model, and the number of steps in an epoch if it knows it.
    """

    _model: Any = None
    _steps: int | None = None

    # Neither Keras needs to wait for the step's logs.
    async_safe = True
    _supports_tf_logs = True

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("on_", "set_", "_implements_")):
            return _nothing
        raise AttributeError(name)

    def _implements_train_batch_hooks(self) -> bool:
        return True

    def set_model(self, model: Any) -> None:
        self._model = model

    def set_params(self, params: Any) -> None:
        self._steps = (params or {}).get("steps")

    def _steps_until(self, batch: int) -> int:
        """Returns how many steps of the epoch are done after a batch."""
        # With steps_per_execution several steps end in one batch, and Keras 3
        # counts the steps beyond an epoch's last one, too.
        return batch + 1 if self._steps is None else min(batch + 1, self._steps)


def _nothing(*args: Any, **kwargs: Any) -> None:
    pass


def check_store(store: Any) -> None:
    """Raises a ValueError if a layer may not load from a store.

    tf_keras gives layers groups of HDF5 unchecked; Keras 3 checks its stores.
    """
    if type(store).__module__.partition(".")[0] == "h5py":
        from tfrs_embed.compat import hdf5  # h5py takes a while to import.

        hdf5.objects(store)
