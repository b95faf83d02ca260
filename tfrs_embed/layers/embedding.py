"""A plain trainable embedding layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from tfrs_embed.compat import keras_configs, keras_versions
from tfrs_embed.compat.arguments import choice, flag, integer
from tfrs_embed.configs.tables import COMBINERS
from tfrs_embed.configs.types import Combiner, KerasArguments
from tfrs_embed.layers import errors
from tfrs_embed.layers.base import Layer
from tfrs_embed.ops.embedding_lookup import embedding_lookup
from tfrs_embed.storage import allocation

if TYPE_CHECKING:
    from typing_extensions import Unpack

# The arguments that are Keras's objects, and their kinds.
_KINDS = {
    "embeddings_initializer": "initializers",
    "embeddings_regularizer": "regularizers",
    "activity_regularizer": "regularizers",
    "embeddings_constraint": "constraints",
}


class Embedding(Layer):
    """An embedding table that the model's optimizer trains.

    Unlike Keras's own `Embedding` it combines ids, takes ragged and sparse
    ids and weights, checks ids, and gives optimizers gradients over sorted
    unique ids.

    Example:
        >>> layer = tfrs_embed.Embedding(1000, 16, combiner="mean")
        >>> layer(tf.ragged.constant([[1, 2, 2], [], [7]])).shape
        TensorShape([3, 16])

    Args:
        input_dim: number of rows; valid ids are 0 to input_dim - 1.
        output_dim: width of a row.
        embeddings_initializer: initializer of the [input_dim, output_dim]
            table, as in Keras.
        embeddings_regularizer: regularizer of the table, as in Keras.
        activity_regularizer: regularizer of the output, as in Keras.
        embeddings_constraint: constraint on the table, as in Keras.
        mask_zero: whether `compute_mask` masks id 0, as in Keras; dense ids
            without a combiner only.
        combiner: as in `embedding_lookup`.
        input_length: the number of ids of a sample, or several dimensions, as
            in tf_keras, whose Sequential then needs no Input. Not read in
            Keras 3.
        weights: the values of the table, [input_dim, output_dim], or a list of
            them alone, as in Keras. None: the initializer's.
        **kwargs: `name`, `dtype`, `trainable`, as in every Keras layer.

    Call arguments:
        inputs: ids, as in `embedding_lookup`.
        weights: weights, as in `embedding_lookup`.

    Output shape:
        As in `embedding_lookup`; in the layer's compute dtype.

    Raises:
        ValueError: a dimension that is no positive integer, or an unknown
            combiner.
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        embeddings_regularizer: Any = None,
        activity_regularizer: Any = None,
        embeddings_constraint: Any = None,
        mask_zero: bool = False,
        combiner: Combiner | None = None,
        *,
        input_length: int | Sequence[int | None] | None = None,
        weights: Any = None,
        **kwargs: Unpack[KerasArguments],
    ) -> None:
        of_tf_keras = self._keras.__name__ == keras_versions.TF_KERAS
        if input_length is not None and of_tf_keras:
            lengths = input_length
            if not isinstance(lengths, (list, tuple)):
                lengths = [integer(lengths, "input_length")]
            kwargs.setdefault("input_shape", tuple(lengths))
        choice(combiner, (None, *COMBINERS), "combiner")
        if flag(mask_zero, "mask_zero") and combiner is not None:
            raise ValueError(
                "mask_zero=True masks single ids; it has no meaning with "
                f"combiner={combiner!r}."
            )
        super().__init__(**kwargs)
        keras = self._keras
        self.supports_masking = mask_zero
        self.input_dim = integer(input_dim, "input_dim")
        self.output_dim = integer(output_dim, "output_dim")
        initializers, regularizers = keras.initializers, keras.regularizers
        self.embeddings_initializer = initializers.get(embeddings_initializer)
        self.embeddings_regularizer = regularizers.get(embeddings_regularizer)
        self.activity_regularizer = regularizers.get(activity_regularizer)
        self.embeddings_constraint = keras.constraints.get(
            embeddings_constraint
        )
        self.mask_zero = mask_zero
        self.combiner = combiner
        if weights is not None:
            alone = isinstance(weights, (list, tuple)) and len(weights) == 1
            self.set_weights(weights if alone else [weights])

    def build(self, input_shape: Any = None) -> None:
        """Creates the table."""
        shape = (self.input_dim, self.output_dim)
        # The model's optimizer creates the slots.
        with allocation.naming(
            f"Layer '{self.name}'", shape, self.variable_dtype, 0, None
        ):
            self.embeddings = self._add_variable(
                "embeddings",
                shape=shape,
                initializer=self.embeddings_initializer,
                regularizer=self.embeddings_regularizer,
                constraint=self.embeddings_constraint,
            )
        super().build(input_shape)

    def set_weights(self, weights: Any) -> None:
        """Sets the table, [the values]; builds the layer, which needs no ids.

        tf_keras's Sequential models let programs do so before the first batch.
        """
        if not self.built:
            with tf.name_scope(self.name):
                self.build(None)
        super().set_weights(weights)

    @errors.without_input_dump
    def call(
        self, inputs: Any, weights: Any = None
    ) -> tf.Tensor | tf.RaggedTensor:
        """Looks ids up; see the class."""
        output = embedding_lookup(
            keras_versions.variable(self.embeddings),
            inputs,
            self.combiner,
            weights,
        )
        return tf.cast(output, self.compute_dtype)

    if TYPE_CHECKING:
        # Type checkers see Keras's `__call__` as Any.
        __call__ = call

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Masks id 0 if `mask_zero`."""
        return tf.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape: Any) -> Any:
        """The shape of the output for ids of `input_shape`."""
        shape = tf.TensorShape(input_shape)
        if self.combiner is not None:
            shape = shape[:-1]
        return self._as_shape(shape + tf.TensorShape([self.output_dim]))

    def get_config(self) -> dict[str, Any]:
        """The arguments, JSON-able."""
        config = super().get_config()
        for name in ("input_dim", "output_dim", "mask_zero", "combiner"):
            config[name] = getattr(self, name)
        for name, kind in _KINDS.items():
            module, value = getattr(self._keras, kind), getattr(self, name)
            keras_configs.require_small(value, f"Layer '{self.name}': {name}")
            config[name] = module.serialize(value)
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Embedding:
        """Makes the layer from its config, or from that of a Keras Embedding.

        `input_length` is dropped: shapes are inferred. `config` isn't changed.
        An initializer, regularizer or constraint that isn't the Keras's,
        TensorFlow's, registered or imported is a ValueError.
        """
        config = dict(config)
        for key in ("input_length", "batch_input_shape"):
            config.pop(key, None)
        # Keras 3's Embedding has this key; None is its default.
        if config.get("quantization_config") is None:
            config.pop("quantization_config", None)
        for name, kind in _KINDS.items():
            if name in config:
                config[name] = keras_configs.deserialize(
                    config[name], kind, cls._keras, f"Embedding: {name}"
                )
        return cls(**config)
