"""The op `embedding_lookup`: rows of a matrix by ids, with a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tensorflow as tf

from tfrs_embed.compat.custom_gradients import custom_gradient
from tfrs_embed.compat.private_tensorflow import record
from tfrs_embed.compat.strategies import in_tpu_replica, is_tpu, on_host
from tfrs_embed.configs.tables import COMBINERS, FeatureSpec, TableSpec
from tfrs_embed.configs.types import Combiner
from tfrs_embed.ops import backend
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.inputs import CallInputs, to_bags
from tfrs_embed.ops.lookup import activations, combine, gather, gather_densely
from tfrs_embed.ops.sample_matrix import SampleMatrix

F = TypeVar("F", bound=Callable[..., Any])


def _unconverted(function: F) -> F:
    """Keeps AutoGraph off a function, with the function's type."""
    return tf.autograph.experimental.do_not_convert(function)


@_unconverted
def embedding_lookup(
    param: tf.Tensor | tf.Variable,
    ids: Any,
    combiner: Combiner | None = None,
    weights: Any = None,
) -> tf.Tensor | tf.RaggedTensor:
    """Looks up rows of `param` and combines them.

    The gradient of `param` that a tape takes is a `tf.IndexedSlices`, over the
    sorted unique ids unless the tape records weights too.

    Example:
        >>> table = tf.ones([1000, 2])
        >>> ids = tf.ragged.constant([[1, 2, 2], []])
        >>> tfrs_embed.embedding_lookup(table, ids, combiner="sum").numpy()
        array([[3., 3.],
               [0., 0.]], dtype=float32)

    Args:
        param: the table, [vocabulary_size, dim], a variable or a tensor.
        ids: integers in [0, vocabulary_size): a Tensor of any rank, a
            RaggedTensor of rank 2, or, with a combiner, a SparseTensor of
            rank 2 in row-major order.
        combiner: None, or "sum", "mean" = sum(w x) / sum(w) or "sqrtn" =
            sum(w x) / sqrt(sum(w^2)), which reduce the ids' last dimension; no
            ids, or a zero sum, give zeros.
        weights: weights of the ids, of the same kind and shape; only with a
            combiner.

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
    ids = _checked(param, ids, combiner, weights)
    if combiner is None and isinstance(ids, tf.RaggedTensor):
        return ids.with_values(embedding_lookup(param, ids.values))
    output_shape = None
    if combiner is not None and isinstance(ids, tf.Tensor):
        output_shape = (None,) * (ids.shape.rank - 1)
    name = getattr(param, "name", "param").split(":")[0]
    rows, dim = param.shape
    table = TableSpec(name, rows, dim, combiner=combiner or "sum")
    feature = FeatureSpec("ids", table, output_shape=output_shape)
    [bags] = on_host(to_bags, CallInputs([feature], [ids], [weights]))
    on_tpu = tf.distribute.get_strategy() if in_tpu_replica() else None
    if (
        # XLA has no room for unique ids.
        (bags.all_valid is not None or on_tpu is not None)
        # TensorFlow's gradient has the weights' too.
        or bags.learns
        or not record.could_possibly_record()
    ):
        vectors = lookup_table(param, bags, on_tpu)
        return activations([vectors], [bags], [feature], param.dtype)[0]
    unique, index = tf.unique(bags.ids)
    order = tf.argsort(unique)
    unique = tf.gather(unique, order)
    index = tf.gather(tf.math.invert_permutation(order), index)
    rows = tf.cast(tf.gather(param, unique), _wide(param))

    @custom_gradient
    def combined(rows: tf.Tensor) -> Any:
        def backward(gradient: tf.Tensor) -> tf.Tensor:
            operations = backend.operations(None, training=True)
            return operations.sum_gradients_by_row(
                [gradient], [bags], index, tf.shape(rows)[0]
            )

        return combine(rows, index, bags), backward

    return activations([combined(rows)], [bags], [feature], param.dtype)[0]


def _checked(
    param: Any, ids: Any, combiner: Combiner | None, weights: Any
) -> tf.Tensor | tf.RaggedTensor | tf.SparseTensor:
    """Returns the ids as a tensor, after checks of the arguments' kinds."""
    if not tf.is_tensor(param) and not isinstance(param, tf.Variable):
        raise TypeError(
            f"param must be Tensor or Variable, got {type(param).__name__}."
        )
    if param.shape.rank != 2 or not param.shape.is_fully_defined():
        raise ValueError(
            f"param must have a static shape [rows, dim], got {param.shape}."
        )
    if combiner is not None and combiner not in COMBINERS:
        raise ValueError(
            f"combiner must be None or in {list(COMBINERS)}, got {combiner!r}."
        )
    if weights is not None and combiner is None:
        raise ValueError("weights need a combiner.")
    if isinstance(ids, (tf.RaggedTensor, tf.SparseTensor)):
        if ids.shape.rank != 2:
            raise ValueError(
                "Only support 2D input for ragged and sparse ids, got shape "
                f"{ids.shape}."
            )
        if combiner is None and isinstance(ids, tf.SparseTensor):
            raise ValueError("Sparse ids need a combiner.")
        return ids
    ids = tf.convert_to_tensor(ids)
    if combiner is not None and ids.shape.rank is None:
        raise ValueError(
            "ids need a known rank to be combined: tf.ensure_shape gives "
            "them a shape."
        )
    if combiner is not None and ids.shape.rank < 2:
        raise ValueError(
            f"{ids.shape.rank}D input with combiner is ambiguous; add a "
            "dimension to combine over."
        )
    return ids


def lookup_table(
    table: Any, bags: BaggedIds, strategy: tf.distribute.Strategy | None
) -> tf.Tensor:
    """Looks bags up in a variable or a tensor, [vocabulary_size, dim].

    Returns [count, dim] float32, or float64 if the table is.
    """
    wide = _wide(table)
    if strategy is not None and is_tpu(strategy) and bags.bag_size != 1:
        # XLA needs a fixed number of ids.
        known = bags.static_count
        count = bags.count if known is None else known
        matrix = on_host(SampleMatrix.of_bags, bags, count)
        return matrix.combine(tf.cast(tf.gather(table, matrix.ids), wide))
    workers = isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy)
    rows = gather_densely(table, bags.ids) if workers else gather(table, bags)
    return combine(tf.cast(rows, wide), None, bags)


def _wide(table: Any) -> tf.DType:
    """The dtype of a table's sums: half precision is summed in float32."""
    return tf.float64 if table.dtype == tf.float64 else tf.float32
