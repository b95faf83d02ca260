"""Sums of gradients by row, in TensorFlow's operations."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.ops import xla
from tfrs_embed.ops.bags import BaggedIds, Constants, number_evenly

# Up to this width a product with a sparse matrix was the fastest sum of rows,
# two to ten times as fast as others at 8 and 16.
_NARROW = 32


def sum_gradients_by_row(
    gradients: Sequence[tf.Tensor],
    bags: Sequence[BaggedIds],
    index: tf.Tensor,
    num_rows: tf.Tensor,
    dtype: tf.DType | None = None,
) -> tf.Tensor:
    """Sums the gradients of several features' bags into rows.

    The transpose of `combine`, over all features of a table at once.

    Args:
        gradients: each feature's [count, dim] float32.
        bags: each feature's bags.
        index: [sum of n] int32, the row of each id, feature after feature.
        num_rows: scalar int32.
        dtype: float32, or bfloat16 or float16, to which sums are rounded; None:
            that of the gradients.

    Returns:
        [num_rows, dim] of the dtype.
    """
    dtype = dtype or gradients[0].dtype
    spread = _spread if bags[0].validity is None else xla.spread
    return tf.cast(spread(gradients, bags, index, num_rows), dtype)


def _spread(
    gradients: Sequence[tf.Tensor],
    bags: Sequence[BaggedIds],
    index: tf.Tensor,
    num_rows: tf.Tensor,
) -> tf.Tensor:
    constants = Constants()
    gradient = _concat(
        [b.scaled(g, constants) for g, b in zip(gradients, bags, strict=True)]
    )
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


def add_to_firsts(
    values: tf.Tensor, source: tf.Tensor, index: tf.Tensor, num_rows: tf.Tensor
) -> tf.Tensor:
    """rows[index[i]] += values[source[i]]; index has all of the rows."""
    # Where most rows occur once, copying the first value of each and adding the
    # rest costs a third of a segment sum over all.
    number = tf.range(tf.size(index))
    first = tf.math.unsorted_segment_min(number, index, num_rows)
    rest = tf.where(tf.gather(first, index) < number)
    return tf.tensor_scatter_nd_add(
        tf.gather(values, tf.gather(source, first)),
        tf.gather(index, rest),
        tf.gather(values, tf.gather(source, rest[:, 0])),
    )


def _concat(tensors: Sequence[tf.Tensor]) -> tf.Tensor:
    return tensors[0] if len(tensors) == 1 else tf.concat(tensors, 0)
