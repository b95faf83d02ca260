"""The layers as layers of tf_keras, which is Keras 2.

`tfrs_embed` itself has these layers; no program needs to import this module.
Another Keras's are in `tfrs_embed.keras3`. What layers do is in their bodies,
in `tfrs_embed.layers`.
"""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from typing import Any, TypeVar

import tensorflow as tf
import tf_keras

from tfrs_embed._tensorflow import traces_shapes
from tfrs_embed.checkpoint.names import in_graphs
from tfrs_embed.layers import (
    all2all_dense_embedding,
    distributed_embedding,
    dynamic_embedding,
    embedding,
    engine_layer,
    partial_tpu_embedding,
    refuse_keras_3,
)
from tfrs_embed.layers.base import Front
from tfrs_embed.optimizers.conversion import DECLARED

__all__ = [
    "All2AllDenseEmbedding",
    "DistributedEmbedding",
    "Embedding",
    "PartialTPUEmbedding",
]

T = TypeVar("T", bound=type)

# The file's name, which says that it is of Keras's own format.
_PICKLED = "layer.keras"


class _Layer(tf_keras.layers.Layer):
    """A tf_keras layer that knows where it can't be used."""

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
        refuse_keras_3.refuse_call(self.name, (args, kwargs))
        args, kwargs = self._for_keras(args, kwargs)
        return super().__call__(*args, **kwargs)

    def _add_variable(self, name: str, **kwargs: Any) -> Any:
        return self.add_weight(name=name, experimental_autocast=False, **kwargs)


class _TableLayer(_Layer):
    """A layer with an engine, whose objects Python can't pickle."""

    def __reduce__(self) -> Any:
        # As tf_keras pickles its models, and Keras 3 layers too.
        if not self.weights:
            return type(self).from_config, (self.get_config(),)
        if not self.built:
            self.build(None)  # Its tables were read before it was called.
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder, _PICKLED)
            tf_keras.saving.save_model(self, file)
            return _unpickle, (file.read_bytes(),)


def _unpickle(saved: bytes) -> Any:
    """The layer of the bytes that `_TableLayer.__reduce__` made."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, _PICKLED)
        file.write_bytes(saved)
        # Who unpickles runs code in any case.
        return tf_keras.saving.load_model(file, safe_mode=False)


class EngineLayer(engine_layer.EngineLayer, tf_keras.layers.Layer):
    """Looks up an engine's tables, and trains them in the backward pass.

    Args:
        engine: the engine.
        **kwargs: `name`, `dtype`, `trainable`, as in every Keras layer.
    """

    def _add_variable(self, name: str, **kwargs: Any) -> Any:
        return self.add_weight(
            name=name, dtype=tf.float32, experimental_autocast=False, **kwargs
        )

    def _list_weights(self, variables: list[tuple[str, Any]]) -> None:
        # Replicas that build the layer each come by here.
        self._non_trainable_weights[:] = [v for _, v in variables]

    def _differentiate(self, *args: Any) -> tf.Tensor:
        refuse_keras_3.refuse_gradient(self.name, self.gradient_trigger)
        return super()._differentiate(*args)

    @property
    def non_trainable_weights(self) -> list[tf.Variable]:
        """The tables, slots and step, deferred updates applied."""
        self._drain_eagerly()
        return super().non_trainable_weights

    @property
    def _tracking_metadata(self) -> str:
        # Keras asks for it when it saves a model to be loaded as one.
        if not self._engine.has_whole_tables:
            raise NotImplementedError(
                f"Layer '{self.name}' has sharded tables, which Keras can't "
                "load from its SavedModel format. Save as .keras or .h5, or "
                "save weights; tf.saved_model.save exports for serving."
            )
        return super()._tracking_metadata


def _of_tf_keras(layer: T) -> T:
    """Gives a layer its body's documentation, and registers it."""
    layer.__doc__ = layer.__mro__[1].__doc__
    register = tf_keras.saving.register_keras_serializable(package="tfrs_embed")
    return register(layer)


# Keras may find one in the config of a user's own layer.
for _declared in DECLARED:
    tf_keras.saving.register_keras_serializable("tfrs_embed")(_declared)


@_of_tf_keras
class Embedding(embedding.Embedding, _Layer):  # noqa: D101
    pass


@_of_tf_keras
class PartialTPUEmbedding(  # noqa: D101
    partial_tpu_embedding.PartialTPUEmbedding, _TableLayer
):
    pass


@_of_tf_keras
class DistributedEmbedding(  # noqa: D101
    distributed_embedding.DistributedEmbedding, _TableLayer
):
    pass


@_of_tf_keras
class DynamicEmbedding(dynamic_embedding.DynamicEmbedding, _TableLayer):
    pass


@_of_tf_keras
class All2AllDenseEmbedding(  # noqa: D101
    all2all_dense_embedding.All2AllDenseEmbedding, _TableLayer
):
    pass


_Layer._front = EngineLayer._front = Front(
    keras=tf_keras,
    embedding=Embedding,
    engine_layer=EngineLayer,
    layer_name=in_graphs,
    creating=contextlib.nullcontext,
    traces_shapes=traces_shapes,
)
