"""Lookups: rows to activations, in TensorFlow's operations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import unmirrored
from tfrs_embed.compat.custom_gradients import custom_gradient
from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.ops.bags import BaggedIds, sum_by_segment
from tfrs_embed.ops.rounding import widen
from tfrs_embed.ops.stored_table import StoredTable


def lookup(
    tables: Sequence[tf.Variable],
    table_of: Sequence[int],
    bags: Sequence[BaggedIds],
    dtype: tf.DType,
) -> list[tf.Tensor]:
    """Looks up features, each in one of the tables, [rows, dim].

    Returns:
        Each feature's vectors, float32 or of the dtype to which they will be
        cast, [count, dim] or in the bags' layout.
    """
    return [
        combine(widen(gather(tables[t], b)), None, b)
        for t, b in zip(table_of, bags, strict=True)
    ]


def lookup_stored(
    tables: Sequence[StoredTable],
    table_of: Sequence[int],
    bags: Sequence[BaggedIds],
) -> list[tf.Tensor]:
    """Looks up features in tables of an exported model; see `lookup`."""
    return [
        combine(tables[t].gather(b.ids), None, b)
        for t, b in zip(table_of, bags, strict=True)
    ]


def combine_all(
    rows: tf.Tensor,
    index: Sequence[tf.Tensor],
    bags: Sequence[BaggedIds],
) -> list[tf.Tensor]:
    """Combines rows, [m, dim], into the vectors of several features.

    `index` has for each feature [n] int32, the row of each id. Vectors are
    float32, [count, dim] or in the bags' layout.
    """
    rows = widen(rows)
    return [combine(rows, i, b) for i, b in zip(index, bags, strict=True)]


def combine(
    rows: tf.Tensor,
    index: tf.Tensor | None,
    bags: BaggedIds,
) -> tf.Tensor:
    """Combines rows into the bags' vectors, [count, dim]; no ids give zeros.

    Rows are [m, dim] float32 or float64; `index`, [n] int32, is each id's row,
    or None if row i is id i's.
    """
    in_xla = bags.all_valid is not None
    if index is not None and (
        in_xla or bags.weights is not None or bags.bag_size == 1
    ):
        rows, index = tf.gather(rows, index), None
    if in_xla:
        there, all_valid = bags.have_rows()[:, None], bags.all_valid
        nothing = tf.cast(tf.where(all_valid, 0.0, float("nan")), rows.dtype)
        # If the model's optimizer trains the rows, a call with an invalid id
        # gives them no gradient, which would be NaN.
        fixed = tf.where(there, tf.stop_gradient(rows), nothing)
        rows = tf.where(there & all_valid, rows, fixed)
    if bags.weights is not None:
        weights = tf.cast(bags.weights, rows.dtype)
        rows *= tf.expand_dims(weights, 1)
    if bags.bag_size == 1:
        pass
    elif bags.bag_size is not None and index is None:
        shape = [-1, bags.bag_size, rows.shape[1]]
        rows = tf.reduce_sum(tf.reshape(rows, shape), 1)
    elif in_xla:
        # XLA has no sparse sums.
        rows = tf.math.unsorted_segment_sum(rows, bags.bag_of_id(), bags.count)
    else:
        if index is None:
            index = tf.raw_ops.Range(
                start=0,
                limit=tf.size(bags.ids),
                delta=1,
            )
        rows = sum_by_segment(rows, index, bags.bag_of_id(), bags.count)
    return bags.scaled(rows)


def gather(table: Any, bags: BaggedIds) -> tf.Tensor:
    """Gathers the bags' rows, [n, dim]; inside XLA any for ids without one."""
    if bags.all_valid is None:
        return unmirrored.gather(table, bags.ids)
    rows = table.shape[0] or tf.shape(table, bags.ids.dtype)[0]
    return unmirrored.gather(table, tf.minimum(bags.ids, rows - 1))


def gather_densely(table: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
    """Gathers rows; the table's gradient is dense.

    Keras can't gather sparse gradients of different lengths from several
    workers.
    """

    @custom_gradient
    def gather(rows: tf.Tensor) -> Any:
        return tf.gather(rows, ids), lambda g: tf.math.unsorted_segment_sum(
            g, ids, tf.shape(rows)[0]
        )

    return gather(tf.convert_to_tensor(table))


def activations(
    vectors: Sequence[tf.Tensor],
    bags: Sequence[BaggedIds],
    features: Sequence[FeatureSpec],
    dtype: Any,
) -> list[tf.Tensor]:
    """Returns features' vectors in their output shapes and a dtype."""
    return [
        tf.cast(_in_shape(v, b, f.table.dim), dtype)
        for v, b, f in zip(vectors, bags, features, strict=True)
    ]


def _in_shape(vectors: tf.Tensor, bags: BaggedIds, dim: int) -> tf.Tensor:
    shape = bags.static_shape + tf.TensorShape([dim])
    if shape.rank is not None and vectors.shape.is_subtype_of(shape):
        return vectors
    if shape.is_fully_defined():
        # XLA needs a static shape.
        return tf.reshape(vectors, shape.as_list())
    if shape.rank != 2:
        vectors = tf.reshape(vectors, tf.concat([bags.shape, [dim]], 0))
    return tf.ensure_shape(vectors, shape)
