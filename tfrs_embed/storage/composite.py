"""Values that are kept in parts, and look like one variable."""

from __future__ import annotations

import abc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.names import VALUE
from tfrs_embed.compat import strategies
from tfrs_embed.compat.private_tensorflow import SaveSpec, Trackable


class CompositeVariable(Trackable):
    """Variables of this process's shards that look like one variable.

    A checkpoint holds the whole value. A SavedModel holds `_exported`, the
    variables that its functions read: by default all. `workers` processes hold
    the parts.

    Attributes:
        on_read: passed each value that is read as a tensor, to return it; None:
            nobody asks. `UnmirroredVariable` has it too.
    """

    on_read: Callable[[tf.Tensor], tf.Tensor] | None = None
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

    @property
    def trainable(self) -> bool:
        """False: only lookups train a table."""
        return False

    @property
    def is_sharded_variable(self) -> bool:
        # TensorFlow asks when it gives a SavedModel's functions the variables
        # of a model that Keras has made anew, under a strategy.
        raise NotImplementedError(
            f"'{self._shared_name}' is in several parts here, and functions "
            "of a SavedModel read it whole. Load the model without a strategy, "
            "or save it as .keras or .h5, or its weights."
        )

    @abc.abstractmethod
    def numpy(self) -> Any:
        """Returns the whole value."""

    def read(self) -> tf.Tensor:
        """Returns the whole value as a tensor in the host's memory.

        A function reads it each time that it runs. In a replica's function all
        replicas must read it, outside of branches and loops.

        Raises:
            NotImplementedError: a function can't read the value.
        """
        if tf.executing_eagerly():
            with tf.init_scope(), tf.device("CPU:0"):
                value = tf.constant(self.numpy())
        elif self.workers > 1 or strategies.in_tpu_replica():
            value = CompositeVariable._read_in_graph(self)  # The error.
        else:
            # All replicas read together: none has updated its part yet.
            context = tf.distribute.get_replica_context()
            read = self._read_in_graph
            value = context.merge_call(lambda _: read()) if context else read()
        return value if self.on_read is None else self.on_read(value)

    def value(self) -> tf.Tensor:
        """Returns `read()`."""
        return self.read()

    read_value = value

    def _read_in_graph(self) -> tf.Tensor:
        """Returns operations that read the whole value."""
        raise NotImplementedError(
            f"'{self._shared_name}' can't be read as a whole in a tf.function, "
            "as its rows are of keys, on a TPU, or of several workers. Read it "
            "eagerly, between steps; or look its ids up by the layer. Scores "
            "of all rows: top_k of layer.tables."
        )

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


def _operator(name: str) -> Callable[..., Any]:
    """Returns a tensor's operator as a method that reads a variable."""
    return lambda self, *args: getattr(self.read(), name)(*args)


for _name in tf.Tensor.OVERLOADABLE_OPERATORS - {"__eq__", "__ne__"}:
    setattr(CompositeVariable, _name, _operator(_name))


# Keras's HDF5 format takes only variables.
tf.Variable.register(CompositeVariable)
