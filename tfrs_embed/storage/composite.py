"""Values that are kept in parts, and look like one variable."""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.names import VALUE
from tfrs_embed.compat.private_tensorflow import SaveSpec, Trackable


class CompositeVariable(Trackable):
    """Variables of this process's shards that look like one variable.

    A checkpoint holds the whole value. A SavedModel holds `_exported`, the
    variables that its functions read: by default all. `workers` processes hold
    the parts.
    """

    trainable = False
    exporting = False
    dtype: tf.DType
    name: str
    shape: tf.TensorShape
    workers = 1

    def __init__(
        self, variables: Sequence[tf.Variable], strategy: tf.distribute.Strategy
    ) -> None:
        self._variables = list(variables)
        self._exported: Sequence[tf.Variable] = self._variables
        # Keras checks here whether a weight belongs to its strategy.
        self._distribute_strategy = strategy

    def __setattr__(self, name: str, value: Any) -> None:
        # Keras would set these when it loads a SavedModel, to functions that
        # know the shards' variables only.
        if name not in ("_serialize_to_tensors", "_restore_from_tensors"):
            super().__setattr__(name, value)

    @property
    def _shared_name(self) -> str:
        """The variable's name in a checkpoint's description."""
        return self.name.split(":")[0]

    @abc.abstractmethod
    def numpy(self) -> Any:
        """Returns the whole value."""

    def read(self) -> tf.Tensor:
        """Returns the whole value as a tensor in the host's memory."""
        with tf.init_scope(), tf.device("CPU:0"):
            return tf.constant(self.numpy())

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        value = np.asarray(self.numpy())
        return value.astype(dtype or value.dtype, copy=False)

    @abc.abstractmethod
    def assign(self, value: Any) -> None:
        """Sets the whole value."""

    def _serialize_to_tensors(self) -> dict[str, Any]:
        if self.exporting or not tf.executing_eagerly():
            return {}
        # With the host's full name, as other variables have, TensorFlow saves
        # and restores without a function.
        with tf.init_scope(), tf.device("CPU:0"):
            host = tf.zeros([]).device
        # A callable: restoring asks for it too, and must not read the value.
        whole = SaveSpec(
            tensor=self.read,
            slice_spec="",
            name="",
            dtype=self.dtype,
            device=host,
        )
        return {VALUE: whole}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        if restored_tensors:
            self.assign(restored_tensors[VALUE])

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        self.exporting = save_type == "savedmodel"
        if self.exporting:
            if self.workers > 1:
                raise RuntimeError(
                    f"'{self._shared_name}' is spread over {self.workers} "
                    "workers, and a SavedModel would hold the part of one: "
                    "tfrs_embed.serving.export gathers all parts."
                )
            for i, variable in enumerate(self._exported):
                children[f"shard_{i}"] = variable
        return children

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} '{self.name}' shape={tuple(self.shape)} "
            f"dtype={self.dtype.name}>"
        )


def _to_tensor(
    value: CompositeVariable,
    dtype: Any = None,
    name: Any = None,
    as_ref: Any = None,
) -> tf.Tensor:
    tensor = value.read()
    return tensor if dtype is None else tf.cast(tensor, dtype)


tf.register_tensor_conversion_function(CompositeVariable, _to_tensor)


# Keras's HDF5 format takes only variables.
tf.Variable.register(CompositeVariable)
