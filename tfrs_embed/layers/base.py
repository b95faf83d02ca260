"""The base of all layers, independent of the Keras.

A layer is a body, which knows no Keras: its arguments, configuration, engines.
A front (`keras2.py`, `keras3.py`) makes a layer of a Keras from the body: the
class that users construct inherits from the body, then from the front's
`_Layer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import tensorflow as tf

from tfrs_embed.layers import errors, other_keras
from tfrs_embed.ops.tensors import ids_to_tensor, to_tensor

#: Changes a feature's ids. Takes the ids, their name in errors, their dtype,
#: and whether they are ragged (None: unknown).
ChangeIds = Callable[[Any, str, tf.DType, bool | None], Any]


class Layer:
    """The body of a layer."""

    # Defined by fronts.
    #: The package of the Keras.
    _keras: ClassVar[Any]
    #: The layer class of small tables, which the model's optimizer trains.
    _embedding_class: ClassVar[Any]
    #: The layer class around engines.
    _engine_layer_class: ClassVar[Any]
    #: Converts a table's name to a layer's name.
    _layer_name: ClassVar[Any]
    #: Whether Keras is calling a model with placeholders, for shapes.
    _traces_shapes: ClassVar[Any]
    #: Makes a shape of the Keras's kind.
    _as_shape: ClassVar[Any]

    if TYPE_CHECKING:
        # Defined by Keras's layers.
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
        set_weights: Any
        _track_trackable: Any
        _trackable_children: Any
        #: Takes a weight's name, and the arguments of `add_weight`.
        _add_variable: Any

        def __init__(self, **kwargs: Any) -> None:
            """Makes the layer."""

    @errors.without_input_dump
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer, as every Keras layer is called.

        Raises:
            TypeError: a model of the other Keras calls the layer, or the inputs
                are of the other Keras.
        """
        other_keras.refuse_call(self.name, self._keras, (args, kwargs))
        inputs = args[0] if args else kwargs.get("inputs")
        if inputs is not None:
            if self._traces_shapes():
                # Keras rebuilds a loaded model from the shapes of its inputs
                # alone, with dense floats. Such a graph never runs, so weights
                # are left out.
                inputs = self._map_ids(_as_ids, inputs)
                args = args[:1]
                kwargs.pop("weights", None)
            inputs = self._prepare(inputs)
            if args:
                args = (inputs, *map(_from_pandas, args[1:]))
            else:
                kwargs["inputs"] = inputs
        if "weights" in kwargs:
            kwargs["weights"] = _from_pandas(kwargs["weights"])
        return super().__call__(*args, **kwargs)  # type: ignore[misc]

    def to_tensors(self, inputs: Any) -> Any:
        """Converts ids as a call does, for a Keras that doesn't take them.

        `fit` refuses lists, arrays of objects and columns of pandas before the
        layer sees them, in errors without the feature.

        Example:
            >>> table = tfrs_embed.TableConfig("movies", 100, 8)
            >>> layer = tfrs_embed.PartialTPUEmbedding({"seen": table}, "sgd")
            >>> column = np.array([[3, 5], [7]], object)
            >>> layer.to_tensors({"seen": column})
            {'seen': <tf.RaggedTensor [[3, 5], [7]]>}

        Args:
            inputs: a call's inputs, features of which may be missing.

        Returns:
            Tensors in the same nesting. Arrays of lists are ragged.

        Raises:
            TypeError: ids are no tensor, have missing values, or are dates.
        """

        def convert(ids: Any, what: str, dtype: Any, _: bool | None) -> Any:
            return to_tensor(ids_to_tensor(ids, what, dtype), what)

        return self._map_ids(convert, inputs)

    def _prepare(self, inputs: Any) -> Any:
        """Converts a call's inputs for Keras."""
        changed = []

        def convert(ids: Any, what: str, dtype: Any, _: bool | None) -> Any:
            made = ids_to_tensor(ids, what, dtype)
            changed.append(made is not ids)
            return made

        mapped = self._map_ids(convert, inputs)
        return mapped if any(changed) else inputs

    def _map_ids(self, change: ChangeIds, inputs: Any) -> Any:
        """Applies `change` to the ids of each feature of a call's inputs."""
        return change(inputs, f"Layer '{self.name}': ids", tf.int64, False)


def _from_pandas(nested: Any) -> Any:
    """Makes arrays of pandas's values, which tf_keras doesn't take."""
    return tf.nest.map_structure(
        lambda each: each.to_numpy() if hasattr(each, "to_numpy") else each,
        nested,
    )


def _as_ids(ids: Any, _: str, dtype: tf.DType, ragged: bool | None) -> Any:
    """Converts float placeholders to ids; returns other tensors unchanged."""
    if not (isinstance(ids, tf.Tensor) and ids.dtype.is_floating):
        return ids
    if ragged is None:
        # Dense ids rarely have an unknown width; ragged ids always have.
        ragged = ids.shape.rank == 2 and ids.shape[1] is None
    ids = tf.as_string(ids) if dtype == tf.string else tf.cast(ids, dtype)
    return tf.RaggedTensor.from_tensor(ids) if ragged else ids
