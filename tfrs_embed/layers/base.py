"""What layers of this library are, whatever Keras they are layers of.

A layer has a body, which is free of Keras: its arguments, its configuration,
its engines. A front makes a layer of tf_keras, or of Keras 3, of it. The body's
class comes before the front's among the bases of the class that users make.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import tensorflow as tf

from tfrs_embed.compat import arguments
from tfrs_embed.layers import errors, other_keras

#: Changes the ids of a feature. It is also given what errors call these, the
#: dtype that ids have, and whether they are ragged; None: that is not known.
ChangeIds = Callable[[Any, str, tf.DType, bool | None], Any]

# The arguments that Keras takes out of a call, and that most calls have.
_OF_CALLS = ("training", "mask", "weights")


class Layer:
    """The body of a layer."""

    # What a front brings, besides the methods below.
    #: Its Keras's package.
    _keras: ClassVar[Any]
    #: The layer of small tables, which the model's optimizer trains.
    _embedding_class: ClassVar[Any]
    #: The layer around engines.
    _engine_layer_class: ClassVar[Any]
    #: Makes a layer's name of a table's.
    _layer_name: ClassVar[Any]
    #: Whether the Keras calls a model with placeholders, for shapes.
    _traces_shapes: ClassVar[Any]

    if TYPE_CHECKING:
        # A Keras's own, which the front brings.
        name: str
        trainable: bool
        built: bool
        compute_dtype: str
        variable_dtype: str
        activity_regularizer: Any
        supports_masking: bool
        _dtype_policy: Any
        build: Any
        call: Any
        get_config: Any
        _track_trackable: Any
        _trackable_children: Any
        #: Takes a weight's name, and the arguments of Keras's `add_weight`.
        _add_variable: Any

        def __init__(self, **kwargs: Any) -> None:
            """Makes the layer."""

    @errors.without_input_dump
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer, as every Keras layer is called.

        Raises:
            TypeError: an argument is misspelt; or the layer is called by a
                model, or with inputs, of the other Keras.
        """
        other_keras.refuse_call(self.name, self._keras, (args, kwargs))
        rare = [name for name in kwargs if name not in _OF_CALLS]
        if rare:
            known, more = arguments.names(type(self).call)
            unknown = [n for n in rare if n not in known and not more]
            where = f"A call of layer '{self.name}'"
            arguments.require_known(where, unknown, known)
        inputs = args[0] if args else kwargs.get("inputs")
        if inputs is not None:
            if self._traces_shapes():
                # A Keras rebuilds a loaded model of the shapes of its inputs
                # alone, and takes all of them for dense floats. Such a graph
                # never runs, so weights are left out.
                inputs = self._map_ids(_as_ids, inputs)
                args = args[:1]
                kwargs.pop("weights", None)
            inputs = self._prepare(inputs)
            if args:
                args = (inputs, *args[1:])
            else:
                kwargs["inputs"] = inputs
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def _prepare(self, inputs: Any) -> Any:
        """What Keras is given for inputs."""
        return inputs

    def _map_ids(self, change: ChangeIds, inputs: Any) -> Any:
        """A call's inputs, in which the ids of each feature are changed."""
        return tf.nest.map_structure(
            lambda ids: change(ids, "ids", tf.int64, False), inputs
        )


def _as_ids(ids: Any, _: str, dtype: tf.DType, ragged: bool | None) -> Any:
    """Makes ids of a placeholder of floats; other tensors stay as they are."""
    if not (isinstance(ids, tf.Tensor) and ids.dtype.is_floating):
        return ids
    if ragged is None:
        # Dense ids seldom have an unknown width, ragged ones always.
        ragged = ids.shape.rank == 2 and ids.shape[1] is None
    ids = tf.as_string(ids) if dtype == tf.string else tf.cast(ids, dtype)
    return tf.RaggedTensor.from_tensor(ids) if ragged else ids
