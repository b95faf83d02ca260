"""Types of arguments, for type checkers.

TensorFlow and tf_keras ship no types: to a type checker their objects are
`Any`, or a protocol with the used attributes.

Example:
    >>> def make_table(name: str, combiner: tfrs_embed.types.Combiner):
    ...     return tfrs_embed.TableConfig(name, 1000, 16, combiner=combiner)
    >>> make_table("movies", "sum").combiner
    'sum'
"""

from __future__ import annotations

from typing import Any, Literal, Protocol, TypedDict

from tfrs_embed.optimizers.declared import OptimizerName
from tfrs_embed.optimizers.rules import TableOptimizer

__all__ = [
    "Combiner",
    "CommunicationDtype",
    "HasLearningRate",
    "InvalidIds",
    "KerasArguments",
    "LayerArguments",
    "Optimizer",
    "OptimizerName",
    "Rounding",
    "TablePlace",
]

#: How several ids of one sample become one vector.
Combiner = Literal["sum", "mean", "sqrtn"]

#: What rows and gradients are sent as between replicas.
CommunicationDtype = Literal["float32", "bfloat16", "float16"]

#: The place that a table asks for.
TablePlace = Literal[
    "auto",
    "row",
    "column",
    "table",
    "replicated",
    "host",
    "sparsecore",
    "sharded",
    "default_device",
]

#: How the new rows of a table of two bytes are rounded.
Rounding = Literal["stochastic", "nearest"]

#: The treatment of an id outside its table.
InvalidIds = Literal["error", "zero"]


class HasLearningRate(Protocol):
    """An optimizer of Keras, of TensorFlow's TPU embeddings, or of ours.

    Example:
        >>> def rate_of(optimizer: tfrs_embed.types.HasLearningRate) -> float:
        ...     return float(optimizer.learning_rate)
        >>> rate_of(tf.tpu.experimental.embedding.SGD(0.5))
        0.5
    """

    @property
    def learning_rate(self) -> Any:
        """The rate."""


#: The optimizer of a table: a name, an object, or None.
Optimizer = OptimizerName | HasLearningRate | TableOptimizer | None


class KerasArguments(TypedDict, total=False):
    """The arguments of every Keras layer.

    Example:
        >>> arguments: tfrs_embed.types.KerasArguments = {"name": "movies"}
        >>> tfrs_embed.Embedding(1000, 16, **arguments).name
        'movies'

    Attributes:
        name: the layer's name, which may be in its checkpoints' keys.
        dtype: the dtype of its activations, or a mixed precision policy.
        trainable: whether training changes the layer's tables.
        input_shape: the shape of a sample, for `tf_keras.Sequential`.
        batch_input_shape: the shape of a batch, likewise.
    """

    name: str | None
    dtype: Any
    trainable: bool
    input_shape: Any
    batch_input_shape: Any


class LayerArguments(KerasArguments, total=False):
    """The arguments of a Keras layer, and a regularizer of its activations.

    Example:
        >>> arguments: tfrs_embed.types.LayerArguments = {
        ...     "activity_regularizer": tf_keras.regularizers.L2(0.01)
        ... }
        >>> table = tfrs_embed.TableConfig("movies", 1000, 16)
        >>> feature = tfrs_embed.FeatureConfig("movie", table)
        >>> layer = tfrs_embed.DistributedEmbedding(feature, **arguments)

    Attributes:
        name, dtype, trainable, input_shape, batch_input_shape: see
            `KerasArguments`.
        activity_regularizer: adds a loss that depends on the activations.
    """

    activity_regularizer: Any
