"""What layers of this library are, whatever Keras they are layers of.

A layer has a body, which is free of Keras: its arguments, its configuration,
its engines. A front makes a layer of tf_keras, or of Keras 3, of it. The body's
class comes before the front's among the bases of the class that users make.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import tensorflow as tf

from tfrs_embed import arguments

#: Changes the ids of a feature. It is also given the dtype that ids have, and
#: whether they are ragged; None: that is not known.
ChangeIds = Callable[[Any, tf.DType, bool | None], Any]

# The arguments that Keras takes out of a call, and that most calls have.
_OF_CALLS = ("training", "mask", "weights")


@dataclasses.dataclass(frozen=True)
class Front:
    """A Keras, as bodies know it.

    Attributes:
        keras: its package.
        embedding: the layer of small tables, which the optimizer trains.
        engine_layer: the layer around engines.
        creating: a context in which variables are made at once, even while the
            Keras only traces what a model returns.
        layer_name: makes a layer's name of a table's.
        traces_shapes: whether it calls a model with placeholders, for shapes.
    """

    keras: Any
    embedding: Any
    engine_layer: Any
    layer_name: Callable[[str], str]
    creating: Callable[[], contextlib.AbstractContextManager[Any]]
    traces_shapes: Callable[[], bool]


class Layer:
    """The body of a layer.

    Args:
        **kwargs: those of every Keras layer.
    """

    #: Set by the front.
    _front: ClassVar[Front]

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
        call: Callable[..., Any]

        def __init__(self, **kwargs: Any) -> None:
            """Makes the layer."""

        def build(self, input_shape: Any = None) -> None:
            """Makes the layer's variables."""

        def get_config(self) -> dict[str, Any]:
            """The arguments."""

        def _add_variable(self, name: str, **kwargs: Any) -> Any:
            """Makes a float32 weight; see `Front`'s layers."""

        def _track_trackable(
            self, value: Any, name: str, overwrite: bool = False
        ) -> None:
            """Has checkpoints hold an object."""

        def _trackable_children(
            self, save_type: str = "checkpoint", **kwargs: Any
        ) -> dict[str, Any]:
            """The objects that checkpoints hold."""

    def _for_keras(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments, as Keras is given them.

        Raises:
            TypeError: the name of one is misspelt.
        """
        rare = [name for name in kwargs if name not in _OF_CALLS]
        if rare:
            known, more = arguments.names(type(self).call)
            unknown = [n for n in rare if n not in known and not more]
            where = f"A call of layer '{self.name}'"
            arguments.require_known(where, unknown, known)
        if self._front.traces_shapes():
            args, kwargs = self._from_shapes(*args, **kwargs)
        partial = bool(kwargs.get("partial", False))
        if args:
            args = (self._prepare(args[0], partial), *args[1:])
        elif "inputs" in kwargs:
            kwargs["inputs"] = self._prepare(kwargs["inputs"], partial)
        return args, kwargs

    def _prepare(self, inputs: Any, partial: bool) -> Any:
        """What Keras is given in place of a call's inputs.

        Args:
            inputs: the call's first argument.
            partial: whether it may leave features out.
        """
        return inputs

    def _map_ids(self, change: ChangeIds, inputs: Any) -> Any:
        """A call's inputs with changed ids.

        Args:
            change: changes the ids of one feature.
            inputs: the call's first argument.
        """
        return tf.nest.map_structure(
            lambda ids: change(ids, tf.int64, False), inputs
        )

    def _from_shapes(
        self, inputs: Any, *others: Any, **kwargs: Any
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A call's arguments, of placeholders that a Keras made of shapes.

        A Keras rebuilds a loaded model of the shapes of its inputs alone, and
        takes all of them for dense floats. Such a graph never runs, so weights
        are left out.

        Returns:
            Positional arguments, with ids of the right dtype and kind, and
            arguments by keyword.
        """
        kwargs.pop("weights", None)
        return (self._map_ids(_as_ids, inputs),), kwargs


def _as_ids(ids: Any, dtype: tf.DType, ragged: bool | None) -> Any:
    """Makes ids of a placeholder of floats; other tensors stay as they are."""
    if not (isinstance(ids, tf.Tensor) and ids.dtype.is_floating):
        return ids
    if ragged is None:
        # Dense ids seldom have an unknown width, ragged ones always.
        ragged = ids.shape.rank == 2 and ids.shape[1] is None
    ids = tf.as_string(ids) if dtype == tf.string else tf.cast(ids, dtype)
    return tf.RaggedTensor.from_tensor(ids) if ragged else ids
