"""What arguments may be, for type checkers.

TensorFlow and tf_keras have no types of their own, so that what is theirs is
`Any` to a type checker, or what it has to have.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol, TypedDict

from tfrs_embed.optimizers.rules import TableOptimizer

#: How several ids of one sample become one vector.
Combiner = Literal["sum", "mean", "sqrtn"]

#: Where a table is asked to be.
TablePlace = Literal["auto", "default_device", "sparsecore", "sharded"]

#: What an id outside its table does.
InvalidIds = Literal["error", "zero"]

#: An optimizer of `tf.tpu.experimental.embedding` with its defaults.
OptimizerName = Literal["sgd", "adagrad", "adagrad_momentum", "adam", "ftrl"]


class HasLearningRate(Protocol):
    """An optimizer of `tf_keras` or `tf.tpu.experimental.embedding`."""

    @property
    def learning_rate(self) -> Any:
        """The rate."""


#: What trains a table: a name, an optimizer, one in the form that a layer's
#: config has it in, or None.
Optimizer = (
    OptimizerName | HasLearningRate | TableOptimizer | Mapping[str, Any] | None
)


class KerasArguments(TypedDict, total=False):
    """The arguments that every layer has by being a Keras layer."""

    name: str | None
    dtype: Any
    trainable: bool
    input_shape: Any
    batch_input_shape: Any


class LayerArguments(KerasArguments, total=False):
    """These, and the regularizer of a layer's activations."""

    activity_regularizer: Any
