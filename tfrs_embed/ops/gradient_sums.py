"""Sums of gradients by row, in TensorFlow's operations."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.ops.bags import (
    BaggedIds,
    concat,
    num_rows,
    number_evenly,
    repeat,
    share_operations,
    sum_by_segment,
)

# Up to this width a product with a sparse matrix was the fastest sum of rows;
# at 8 and 16 it was two to ten times as fast as others.
_NARROW = 32


def sum_gradients_by_row(
    gradients: Sequence[tf.Tensor],
    bags: Sequence[BaggedIds],
    index: tf.Tensor,
    num_rows: tf.Tensor,
    dtype: tf.DType | None = None,
) -> tf.Tensor:
    """Sums the gradients of several features' bags: [num_rows, dim].

    The transpose of `combine`, over all features of a table at once.

    Args:
        gradients: each feature's [count, dim] float32.
        bags: each feature's bags.
        index: [sum of n] int32, each id's row, feature after feature.
        num_rows: scalar int32.
        dtype: float32, bfloat16 or float16; None: the gradients'.
    """
    dtype = dtype or gradients[0].dtype
    narrow = gradients[0].shape[1] <= _NARROW
    weighted = any(b.weights is not None for b in bags)
    if not narrow and (weighted or all(b.bag_size == 1 for b in bags)):
        each = per_id(gradients, bags)
        total = tf.math.unsorted_segment_sum(each, index, num_rows)
        return tf.cast(total, dtype)
    gradient = concat(
        [b.scaled(g) for g, b in zip(gradients, bags, strict=True)]
    )
    bag = _number(bags, tf.size(index))
    if not narrow:
        # Sorting the ids first is faster than an unsorted SparseSegmentSumGrad.
        order = tf.argsort(index)
        bag, index = tf.gather(bag, order), tf.gather(index, order)
        return tf.cast(sum_by_segment(gradient, bag, index, num_rows), dtype)
    weights = tf.ones(tf.shape(index), gradient.dtype)
    if weighted:
        weights = concat(
            [
                tf.ones(tf.shape(b.ids), gradient.dtype)
                if b.weights is None
                else tf.cast(b.weights, gradient.dtype)
                for b in bags
            ]
        )
    # Pairs of int32 as halves of an int64, low half first: ten times as fast as
    # tf.stack.
    shift = tf.constant(32, tf.int64)
    pairs = tf.cast(index, tf.int64)
    pairs += tf.bitwise.left_shift(tf.cast(bag, tf.int64), shift)
    total = tf.raw_ops.SparseTensorDenseMatMul(
        a_indices=tf.bitcast(pairs, tf.int32),
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
    return tf.cast(total, dtype)


def per_id(
    gradients: Sequence[tf.Tensor], bags: Sequence[BaggedIds]
) -> tf.Tensor:
    """Returns each id's weighted gradient, [sum of n, dim]."""
    parts = []
    for gradient, b in zip(gradients, bags, strict=True):
        gradient = b.scaled(gradient)
        if b.bag_size is None:
            gradient = tf.gather(gradient, b.bag_of_id())
        elif b.bag_size != 1:
            gradient = tf.repeat(gradient, b.bag_size, 0)
        if b.weights is not None:
            gradient *= tf.cast(b.weights, gradient.dtype)[:, None]
        parts.append(gradient)
    return concat(parts)


def _number(bags: Sequence[BaggedIds], ids: tf.Tensor) -> tf.Tensor:
    """Returns each id's bag, numbered over all features, of `ids` ids."""
    [size, *others] = {b.bag_size for b in bags}
    if size is not None and not others:
        return number_evenly(ids // size, size)
    if share_operations():
        firsts = tf.cumsum(tf.stack([b.count for b in bags]), exclusive=True)
        numbers = concat([b.bag_of_id() for b in bags])
        return numbers + repeat(firsts, num_rows([b.ids for b in bags]))
    numbers = []
    first = tf.constant(0)
    for b in bags:
        numbers.append(b.bag_of_id() + first)
        first += b.count
    return concat(numbers)
