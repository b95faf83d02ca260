"""A plain trainable embedding layer, and the op it is made of."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import tensorflow as tf
import tf_keras

from tfrs_embed.arguments import named
from tfrs_embed.configs import COMBINERS, FeatureSpec, TableSpec, as_int
from tfrs_embed.layers import errors
from tfrs_embed.layers.base import Layer
from tfrs_embed.ops.bags import to_bags
from tfrs_embed.ops.lookup import combine, reshape_output, spread
from tfrs_embed.types import Combiner, KerasArguments
from tfrs_embed.weak_gradients import custom_gradient

if TYPE_CHECKING:
    from typing_extensions import Unpack

F = TypeVar("F", bound=Callable[..., Any])


def _unconverted(function: F) -> F:
    """Keeps AutoGraph off a function, and its types on."""
    return tf.autograph.experimental.do_not_convert(function)


@_unconverted
def embedding_lookup(
    param: tf.Tensor | tf.Variable,
    ids: Any,
    combiner: Combiner | None = None,
    weights: Any = None,
) -> tf.Tensor | tf.RaggedTensor:
    """Looks up rows of `param` and combines them.

    The gradient of `param` is an `tf.IndexedSlices` over the sorted unique ids.

    Args:
        param: the table, [vocabulary_size, dim], a variable or a tensor.
        ids: integers in [0, vocabulary_size): a Tensor of any rank, a
            RaggedTensor of rank 2, or, with a combiner, a SparseTensor of
            rank 2 in row-major order.
        combiner: None, or "sum", "mean" = sum(w x) / sum(w) or "sqrtn" =
            sum(w x) / sqrt(sum(w^2)), which reduce the ids' last dimension; no
            ids, or a zero sum, give zeros.
        weights: weights of the ids, of the same kind and shape; only with a
            combiner. They get no gradient.

    Returns:
        Without a combiner shape(ids) + [dim], ragged for ragged ids. With one,
        dense ids [d1, ..., dn] give [d1, ..., d(n-1), dim], and ragged and
        sparse ones [batch, dim]. In param's dtype.

    Raises:
        TypeError: `param` is not a tensor, or ids or weights have a wrong
            dtype or kind.
        ValueError: a wrong combiner, rank or static shape.
        tf.errors.InvalidArgumentError: an id is out of range, weights differ
            from the ids in shape, splits or indices, or sparse ids are not
            sorted.
    """
    if not tf.is_tensor(param) and not isinstance(param, tf.Variable):
        raise TypeError(
            f"param must be Tensor or Variable, got {type(param).__name__}."
        )
    if param.shape.rank != 2 or not param.shape.is_fully_defined():
        raise ValueError(
            "param must have the static shape [vocabulary_size, dim], got "
            f"{param.shape}."
        )
    if combiner is not None and combiner not in COMBINERS:
        raise ValueError(
            f"combiner must be None or one of {list(COMBINERS)}, got "
            f"{combiner!r}."
        )
    if weights is not None and combiner is None:
        raise ValueError("weights need a combiner.")
    if not isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
        ids = tf.convert_to_tensor(ids)
    elif ids.shape.rank != 2:
        raise ValueError(
            "Only support 2D input for ragged and sparse ids, got shape "
            f"{ids.shape}."
        )
    output_shape = None
    if combiner is None:
        if isinstance(ids, tf.SparseTensor):
            raise ValueError("Sparse ids need a combiner.")
        if isinstance(ids, tf.RaggedTensor):
            rows = embedding_lookup(param, ids.values)
            return ids.with_values(rows)
    elif isinstance(ids, tf.Tensor):
        if ids.shape.rank is None:
            raise ValueError("ids need a known rank to be combined.")
        if ids.shape.rank < 2:
            raise ValueError(
                f"{ids.shape.rank}D input with combiner is ambiguous; add a "
                "dimension to combine over."
            )
        output_shape = (None,) * (ids.shape.rank - 1)
    feature = _feature(param, combiner, output_shape)
    [bags] = to_bags([feature], [ids], [weights])
    unique, index = _sorted_unique(bags.ids)
    # Half precision is summed in float32.
    wide = tf.float64 if param.dtype == tf.float64 else tf.float32
    rows = tf.cast(tf.gather(param, unique), wide)

    @custom_gradient
    def combined(rows: tf.Tensor) -> Any:
        def backward(gradient: tf.Tensor) -> tf.Tensor:
            return spread([gradient], [bags], index, tf.shape(rows)[0])

        return combine(rows, index, bags), backward

    vectors = tf.cast(combined(rows), param.dtype)
    return reshape_output(vectors, bags, param.shape[1])


def _sorted_unique(ids: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    """The unique ids in ascending order, and each id's place among them."""
    unique, index = tf.unique(ids)
    order = tf.argsort(unique)
    place = tf.math.invert_permutation(order)
    return tf.gather(unique, order), tf.gather(place, index)


def _feature(
    param: Any, combiner: str | None, output_shape: Any
) -> FeatureSpec:
    table = TableSpec(
        name=getattr(param, "name", "param").split(":")[0],
        vocabulary_size=param.shape[0],
        dim=param.shape[1],
        initializer=None,
        optimizer=None,
        combiner=combiner or "sum",
        placement="auto",
        max_ids_per_partition=256,
        max_unique_ids_per_partition=256,
        source=None,
    )
    return FeatureSpec("ids", table, 0, output_shape, None)


@tf_keras.saving.register_keras_serializable(package="tfrs_embed")
class Embedding(Layer):
    """An embedding table that the model's optimizer trains.

    Unlike `tf_keras.layers.Embedding` it combines ids, takes ragged and sparse
    ids and weights, checks ids, and gives optimizers gradients over sorted
    unique ids.

    ```python
    layer = tfrs_embed.Embedding(1000, 16, combiner="mean")
    layer(tf.ragged.constant([[1, 2, 2], [], [7]]))  # [3, 16]
    ```

    Args:
        input_dim: number of rows; valid ids are 0 to one less.
        output_dim: width of a row.
        embeddings_initializer: initializer of the [input_dim, output_dim]
            table, as in Keras.
        embeddings_regularizer: regularizer of the table, as in Keras.
        activity_regularizer: regularizer of the output, as in Keras.
        embeddings_constraint: constraint on the table, as in Keras.
        mask_zero: whether `compute_mask` masks id 0, as in Keras; dense ids
            without a combiner only.
        combiner: as in `embedding_lookup`.
        **kwargs: `name`, `dtype`, `trainable`, as in every Keras layer.

    Call arguments:
        inputs: ids, as in `embedding_lookup`.
        weights: weights, as in `embedding_lookup`.

    Output shape:
        As in `embedding_lookup`; in the layer's compute dtype.

    Raises:
        ValueError: a dimension that is not positive, or an unknown combiner.
        TypeError: a dimension that is no integer.
    """

    @named
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
        **kwargs: Unpack[KerasArguments],
    ) -> None:
        for dim, name in ((input_dim, "input_dim"), (output_dim, "output_dim")):
            if as_int(dim) is None:
                raise TypeError(f"{name} must be an integer, got {dim!r}.")
        input_dim, output_dim = map(operator.index, (input_dim, output_dim))
        if input_dim <= 0 or output_dim <= 0:
            raise ValueError(
                "Both input_dim and output_dim should be positive, got "
                f"input_dim={input_dim} and output_dim={output_dim}."
            )
        if combiner is not None and combiner not in COMBINERS:
            raise ValueError(
                f"combiner must be None or one of {list(COMBINERS)}, got "
                f"{combiner!r}."
            )
        if mask_zero and combiner is not None:
            raise ValueError(
                "mask_zero=True masks single ids; it has no meaning with "
                f"combiner={combiner!r}."
            )
        super().__init__(**kwargs)
        self.supports_masking = mask_zero
        self.input_dim = input_dim
        self.output_dim = output_dim
        self.embeddings_initializer = tf_keras.initializers.get(
            embeddings_initializer
        )
        self.embeddings_regularizer = tf_keras.regularizers.get(
            embeddings_regularizer
        )
        self.activity_regularizer = tf_keras.regularizers.get(
            activity_regularizer
        )
        self.embeddings_constraint = tf_keras.constraints.get(
            embeddings_constraint
        )
        self.mask_zero = mask_zero
        self.combiner = combiner

    def build(self, input_shape: Any = None) -> None:
        """Creates the table."""
        self.embeddings = self.add_weight(
            shape=(self.input_dim, self.output_dim),
            initializer=self.embeddings_initializer,
            name="embeddings",
            regularizer=self.embeddings_regularizer,
            constraint=self.embeddings_constraint,
            experimental_autocast=False,
        )
        super().build(input_shape)

    if TYPE_CHECKING:
        # To a type checker Keras's own is Any.
        def __call__(
            self, inputs: Any, weights: Any = None
        ) -> tf.Tensor | tf.RaggedTensor:
            """Looks ids up; see the class."""

    @errors.plain
    def call(
        self, inputs: Any, weights: Any = None
    ) -> tf.Tensor | tf.RaggedTensor:
        """Looks ids up; see the class."""
        output = embedding_lookup(
            self.embeddings, inputs, self.combiner, weights
        )
        return tf.cast(output, self.compute_dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Masks id 0 if `mask_zero`."""
        return tf.not_equal(inputs, 0) if self.mask_zero else None

    def compute_output_shape(self, input_shape: Any) -> tf.TensorShape:
        """The shape of the output for ids of `input_shape`."""
        shape = tf.TensorShape(input_shape)
        if self.combiner is not None:
            shape = shape[:-1]
        return shape + tf.TensorShape([self.output_dim])

    def __repr__(self) -> str:
        """The table's shape and the combiner."""
        if not hasattr(self, "combiner"):
            return super().__repr__()  # It is being made.
        return (
            f"<Embedding '{self.name}': [{self.input_dim}, {self.output_dim}], "
            f"combiner={self.combiner!r}>"
        )

    def get_config(self) -> dict[str, Any]:
        """The arguments, JSON-able."""
        config = super().get_config()
        config.update(
            input_dim=self.input_dim,
            output_dim=self.output_dim,
            embeddings_initializer=tf_keras.initializers.serialize(
                self.embeddings_initializer
            ),
            embeddings_regularizer=tf_keras.regularizers.serialize(
                self.embeddings_regularizer
            ),
            activity_regularizer=tf_keras.regularizers.serialize(
                self.activity_regularizer
            ),
            embeddings_constraint=tf_keras.constraints.serialize(
                self.embeddings_constraint
            ),
            mask_zero=self.mask_zero,
            combiner=self.combiner,
        )
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Embedding:
        """Makes the layer of its config, or of a Keras Embedding's.

        Args:
            config: what `get_config` of either returned. It is not changed.

        Returns:
            The layer. `input_length` is dropped: shapes are inferred.
        """
        config = dict(config)
        for key in ("input_length", "batch_input_shape"):
            config.pop(key, None)
        return cls(**config)
