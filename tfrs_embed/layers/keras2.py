"""The layers of tf_keras, which is Keras 2.

`tfrs_embed` has these layers; programs need not import this module. The layers
of Keras 3 are in `tfrs_embed.keras3`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
import tf_keras

from tfrs_embed.checkpoint.names import in_graphs
from tfrs_embed.compat import keras_versions
from tfrs_embed.compat.private_tensorflow import traces_shapes
from tfrs_embed.compat.unmirrored import UnmirroredVariable
from tfrs_embed.layers import (
    all2all_dense_embedding,
    distributed_embedding,
    dynamic_embedding,
    embedding,
    engine_layer,
    other_keras,
    partial_tpu_embedding,
)

__all__ = [
    "All2AllDenseEmbedding",
    "DistributedEmbedding",
    "DynamicEmbedding",
    "Embedding",
    "PartialTPUEmbedding",
]


class _Layer(tf_keras.layers.Layer):
    """A tf_keras layer that is given ids."""

    _keras = tf_keras
    _layer_name = staticmethod(in_graphs)
    _traces_shapes = staticmethod(traces_shapes)
    _as_shape = tf.TensorShape

    def __init__(self, **kwargs: Any) -> None:
        # tf_keras takes these of every layer, and reads none of them.
        shaped = kwargs.keys() & {"input_dim", "input_shape"}
        for name in ("implementation", *(() if shaped else ("batch_size",))):
            if name in kwargs:
                raise TypeError(
                    f"{type(self).__name__} takes no argument '{name}'."
                )
        super().__init__(autocast=False, **kwargs)
        self._supports_ragged_inputs = True

    def _add_variable(self, name: str, **kwargs: Any) -> Any:
        return self.add_weight(name=name, experimental_autocast=False, **kwargs)

    def _set_mask_metadata(
        self, inputs: Any, outputs: Any, *rest: Any, **kwargs: Any
    ) -> None:
        if self.supports_masking and "call" in vars(self):
            # While Keras saves a SavedModel, a function replaces `call`, and
            # its outputs have no masks.
            flat = tf.nest.flatten(outputs)
            masks = tf.nest.flatten(self.compute_mask(inputs))
            for output, mask in zip(flat, masks, strict=False):
                # Subclasses may return something else than their vectors.
                if mask is not None and mask.shape.is_compatible_with(
                    output.shape[:-1]
                ):
                    output._keras_mask = mask
        super()._set_mask_metadata(inputs, outputs, *rest, **kwargs)

    def load_own_variables(self, store: Any) -> None:
        keras_versions.check_store(store)
        super().load_own_variables(store)


class EngineLayer(engine_layer.EngineLayer, _Layer):
    """The layer around an engine as a layer of tf_keras."""

    def _list_weights(self, variables: list[tuple[str, Any]]) -> None:
        # Each replica that builds the layer calls this.
        self._non_trainable_weights[:] = [v for _, v in variables]

    def _differentiate(self, *args: Any) -> tf.Tensor:
        other_keras.refuse_gradient(self.name, self.gradient_trigger)
        return super()._differentiate(*args)

    @property
    def _tracking_metadata(self) -> str:
        # Keras reads it when it saves a SavedModel to be loaded by Keras.
        tables = [state.table for state in self.engine.states.values()]
        if not all(isinstance(table, UnmirroredVariable) for table in tables):
            raise NotImplementedError(
                f"Layer '{self.name}' has sharded tables, which Keras can't "
                "load from its SavedModel format. Save as .keras or .h5, or "
                "save weights; tf.saved_model.save exports for serving."
            )
        return super()._tracking_metadata


_register = keras_versions.register(tf_keras)


@_register
class Embedding(embedding.Embedding, _Layer):  # noqa: D101
    __doc__ = embedding.Embedding.__doc__


@_register
class PartialTPUEmbedding(  # noqa: D101
    partial_tpu_embedding.PartialTPUEmbedding, _Layer
):
    __doc__ = partial_tpu_embedding.PartialTPUEmbedding.__doc__


@_register
class DistributedEmbedding(  # noqa: D101
    distributed_embedding.DistributedEmbedding, _Layer
):
    __doc__ = distributed_embedding.DistributedEmbedding.__doc__


@_register
class DynamicEmbedding(dynamic_embedding.DynamicEmbedding, _Layer):  # noqa: D101
    __doc__ = dynamic_embedding.DynamicEmbedding.__doc__


@_register
class All2AllDenseEmbedding(  # noqa: D101
    all2all_dense_embedding.All2AllDenseEmbedding, _Layer
):
    __doc__ = all2all_dense_embedding.All2AllDenseEmbedding.__doc__


_Layer._embedding_class = Embedding
_Layer._engine_layer_class = EngineLayer
