"""Rows to activations, and activations' gradients to rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed import kernels
from tfrs_embed.ops import exported_lookup, kernel_calls, xla
from tfrs_embed.ops.bags import BaggedIds, number_evenly
from tfrs_embed.ops.rounding import widen
from tfrs_embed.weak_gradients import custom_gradient

# Up to this width a product with a sparse matrix was the fastest sum of rows,
# two to ten times as fast as others at 8 and 16.
_NARROW = 32

# What bags of equal size have in common, by their count and size.
_Alike = dict[tuple[int, int | None], tuple[tf.Tensor, tf.Tensor]]


def lookup(
    tables: Sequence[tf.Variable],
    table_of: Sequence[int],
    bags: Sequence[BaggedIds],
    device: str | None,
    training: bool,
    dtype: tf.DType,
) -> list[tf.Tensor]:
    """Looks up features, each in one of the tables.

    Args:
        tables: each [rows, dim] float32, bfloat16 or float16.
        table_of: each feature's table.
        bags: each feature's bags.
        device: where the tables are.
        training: whether this is part of a training step.
        dtype: the dtype that the vectors will be cast to.

    Returns:
        Each feature's vectors, float32 or of the dtype: [count, dim], or in the
        shape that the bags are laid out in.
    """
    module = kernels.operations(device, training)
    if module and bags:
        return kernel_calls.lookup(module, tables, table_of, bags, dtype)
    module = kernels.portable_operations(device)
    if module and bags:
        return exported_lookup.lookup(module, tables, table_of, bags, combine)
    alike: _Alike = {}
    return [
        combine(widen(tf.gather(tables[t], b.ids)), None, b, alike)
        for t, b in zip(table_of, bags, strict=True)
    ]


def combine_all(
    rows: tf.Tensor,
    index: Sequence[tf.Tensor],
    bags: Sequence[BaggedIds],
    device: str | None,
    training: bool,
) -> list[tf.Tensor]:
    """Combines rows into the vectors of several features.

    Args:
        rows: [m, dim] float32, bfloat16 or float16.
        index: each feature's [n] int32, the row of each id.
        bags: each feature's bags.
        device: where the rows are.
        training: whether this is part of a training step.

    Returns:
        Each feature's vectors, [count, dim] float32.
    """
    module = kernels.operations(device, training)
    if module and bags:
        return kernel_calls.combine(module, rows, index, bags)
    rows = widen(rows)
    return [combine(rows, i, b) for i, b in zip(index, bags, strict=True)]


def combine(
    rows: tf.Tensor,
    index: tf.Tensor | None,
    bags: BaggedIds,
    alike: _Alike | None = None,
) -> tf.Tensor:
    """Combines rows into the bags' vectors.

    Args:
        rows: [m, dim] float32 or float64.
        index: [n] int32, the row of each id; None: row i is id i's.
        bags: the bags of the n ids.
        alike: what earlier calls, whose bags still exist, have computed.

    Returns:
        [count, dim] of that dtype; a bag without ids is zero.
    """
    if bags.validity is not None:
        return xla.combine(rows, index, bags)
    if bags.weights is not None:
        if index is not None:
            rows, index = tf.gather(rows, index), None
        rows *= tf.expand_dims(tf.cast(bags.weights, rows.dtype), 1)
    if bags.bag_size == 1:
        if index is not None:
            rows = tf.gather(rows, index)
    else:
        if index is None:
            index, bag = _number_ids(bags, {} if alike is None else alike)
        else:
            bag = bags.bag_of_id()
        rows = tf.raw_ops.SparseSegmentSumWithNumSegments(
            data=rows,
            indices=index,
            segment_ids=bag,
            num_segments=bags.count,
        )
    if bags.scale is not None:
        rows *= tf.expand_dims(tf.cast(bags.scale, rows.dtype), 1)
    return rows


def _number_ids(bags: BaggedIds, alike: _Alike) -> tuple[tf.Tensor, tf.Tensor]:
    """Each id's number and its bag's, [n] int32, once for all bags alike."""
    key = (id(bags.count), bags.bag_size)
    found = alike.get(key) if bags.even else None
    if found is None:
        found = tf.range(tf.size(bags.ids)), bags.bag_of_id()
    if bags.even:
        alike[key] = found
    return found


def gather_densely(table: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
    """Gathers rows; the table's gradient is a tensor of the table's shape.

    Keras's gathering of sparse gradients from several workers fails where
    their lengths differ.

    Args:
        table: [vocabulary_size, dim].
        ids: [n].

    Returns:
        [n, dim].
    """

    @custom_gradient
    def gather(rows: tf.Tensor) -> Any:
        return tf.gather(rows, ids), lambda g: tf.math.unsorted_segment_sum(
            g, ids, tf.shape(rows)[0]
        )

    return gather(tf.convert_to_tensor(table))


def sum_gradients_by_row(
    gradients: Sequence[tf.Tensor],
    bags: Sequence[BaggedIds],
    index: tf.Tensor,
    num_rows: tf.Tensor,
    device: str | None = None,
    dtype: tf.DType | None = None,
) -> tf.Tensor:
    """Sums the gradients of several features' bags into rows.

    The transpose of `combine`, over all features of a table at once.

    Args:
        gradients: each feature's [count, dim] float32.
        bags: each feature's bags.
        index: [sum of n] int32, the row of each id, feature after feature.
        num_rows: scalar int32.
        device: where the rows are.
        dtype: float32, or bfloat16 or float16, to which sums are rounded; None:
            that of the gradients.

    Returns:
        [num_rows, dim] of the dtype.
    """
    dtype = dtype or gradients[0].dtype
    if bags[0].validity is not None:
        return tf.cast(xla.spread(gradients, bags, index, num_rows), dtype)
    module = kernels.operations(device, training=True)
    if module and gradients[0].dtype == tf.float32:
        sizes = [tf.size(b.ids) for b in bags]
        places = [index] if len(bags) == 1 else tf.split(index, sizes)
        return kernel_calls.spread(
            module, gradients, places, bags, num_rows, dtype
        )
    return tf.cast(_spread(gradients, bags, index, num_rows), dtype)


def _spread(
    gradients: Sequence[tf.Tensor],
    bags: Sequence[BaggedIds],
    index: tf.Tensor,
    num_rows: tf.Tensor,
) -> tf.Tensor:
    """`sum_gradients_by_row` by TensorFlow's operations."""
    scaled = [
        g
        if b.scale is None
        else g * tf.expand_dims(tf.cast(b.scale, g.dtype), 1)
        for g, b in zip(gradients, bags, strict=True)
    ]
    gradient = _concat(scaled)
    narrow = gradient.shape[1] <= _NARROW
    unweighted = all(b.weights is None for b in bags)
    one_each = all(b.bag_size == 1 for b in bags)
    if not narrow and unweighted and one_each:
        return tf.math.unsorted_segment_sum(gradient, index, num_rows)
    bag = _number(bags, tf.size(index))
    if not narrow and unweighted:
        return _spread_unweighted(gradient, index, bag, num_rows)
    weights = tf.ones(tf.shape(index), tf.float32)
    if not unweighted:
        weights = _concat(
            [
                tf.ones(tf.shape(b.ids), tf.float32)
                if b.weights is None
                else b.weights
                for b in bags
            ]
        )
    weights = tf.cast(weights, gradient.dtype)
    if narrow:
        return tf.raw_ops.SparseTensorDenseMatMul(
            a_indices=_pairs(index, bag),
            a_values=weights,
            a_shape=tf.concat(
                [
                    tf.cast(num_rows, tf.int64)[None],
                    tf.shape(gradient, tf.int64)[:1],
                ],
                0,
            ),
            b=gradient,
        )
    per_id = tf.gather(gradient, bag) * weights[:, None]
    return tf.math.unsorted_segment_sum(per_id, index, num_rows)


def _number(bags: Sequence[BaggedIds], ids: tf.Tensor) -> tf.Tensor:
    """The bag of each id, the bags of all features numbered in one row.

    Args:
        bags: each feature's.
        ids: the number of their ids.
    """
    [size, *others] = {b.bag_size for b in bags}
    if size is not None and not others:
        return number_evenly(ids // size, size)
    numbers = []
    first = tf.constant(0)
    for b in bags:
        numbers.append(b.bag_of_id() + first)
        first += b.count
    return _concat(numbers)


def _pairs(low: tf.Tensor, high: tf.Tensor) -> tf.Tensor:
    """Pairs of numbers: [n] and [n] int32, not negative, as [n, 2]."""
    # As halves of an int64, the low one first in memory as on all machines that
    # TensorFlow runs on: ten times as fast as tf.stack.
    both = tf.cast(low, tf.int64) + tf.bitwise.left_shift(
        tf.cast(high, tf.int64), tf.constant(32, tf.int64)
    )
    return tf.bitcast(both, tf.int32)


def _spread_unweighted(
    gradient: tf.Tensor, index: tf.Tensor, bag: tf.Tensor, num_rows: tf.Tensor
) -> tf.Tensor:
    """rows[index[i]] += gradient[bag[i]], without a copy per id."""
    # With rows that are not narrow, sorting the ids by row first takes less
    # than SparseSegmentSumGrad does with them unsorted.
    order = tf.argsort(index)
    return tf.raw_ops.SparseSegmentSumWithNumSegments(
        data=gradient,
        indices=tf.gather(bag, order),
        segment_ids=tf.gather(index, order),
        num_segments=num_rows,
    )


def reshape_output(vectors: tf.Tensor, bags: BaggedIds, dim: int) -> tf.Tensor:
    """Returns vectors in the feature's output shape.

    Args:
        vectors: [count, dim], or of the output's shape already.
        bags: the feature's bags.
        dim: the table's width.
    """
    shape = bags.static_shape + tf.TensorShape([dim])
    if vectors.shape.rank == shape.rank and _as_known(vectors.shape, shape):
        return vectors
    if shape.is_fully_defined():
        # XLA needs a static shape.
        vectors = tf.reshape(vectors, shape)
    elif shape.rank != 2:
        vectors = tf.reshape(vectors, tf.concat([bags.shape, [dim]], 0))
    return tf.ensure_shape(vectors, shape)


def _as_known(shape: tf.TensorShape, wanted: tf.TensorShape) -> bool:
    """Whether a shape has all the sizes that are known of another."""
    return all(
        w is None or s == w
        for s, w in zip(shape.as_list(), wanted.as_list(), strict=True)
    )


def _concat(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0)
