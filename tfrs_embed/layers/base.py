"""The base of all layers of this library, as Keras layers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras

from tfrs_embed import arguments
from tfrs_embed.layers import keras_3

# The arguments that Keras takes out of a call, and that most calls have.
_OF_CALLS = ("training", "mask", "weights")


class Layer(tf_keras.layers.Layer):
    """A tf_keras layer that knows where it can't be used.

    Args:
        **kwargs: those of every Keras layer.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self._supports_ragged_inputs = True

    @tf.autograph.experimental.do_not_convert
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the layer, as every Keras layer is called.

        Raises:
            TypeError: an argument is misspelt; or the layer is called by a
                model, or with inputs, of Keras 3.
        """
        keras_3.refuse_call(self.name, (args, kwargs))
        self._check_names(kwargs)
        return super().__call__(*args, **kwargs)

    def _check_names(self, kwargs: dict[str, Any]) -> None:
        """Checks the names of a call's arguments."""
        rare = [name for name in kwargs if name not in _OF_CALLS]
        if rare:
            known, more = arguments.names(type(self).call)
            unknown = [n for n in rare if n not in known and not more]
            where = f"A call of layer '{self.name}'"
            arguments.require_known(where, unknown, known)

    def _maybe_initialize_trackable(self) -> None:
        # What tracks an attribute asks for this first.
        if hasattr(self, "_name"):
            keras_3.refuse_owner(self.name)
        super()._maybe_initialize_trackable()
