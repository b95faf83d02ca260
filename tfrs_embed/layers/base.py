"""What all layers of this library have in common as Keras layers."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras

from tfrs_embed.layers import keras_3


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
            TypeError: by a model, or with inputs, of Keras 3.
        """
        keras_3.refuse_call(self.name, (args, kwargs))
        return super().__call__(*args, **kwargs)

    def _maybe_initialize_trackable(self) -> None:
        # What tracks an attribute asks for this first.
        if hasattr(self, "_name"):
            keras_3.refuse_owner(self.name)
        super()._maybe_initialize_trackable()
