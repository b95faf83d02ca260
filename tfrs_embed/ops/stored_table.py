"""Tables as exported models store them: rows of few bits."""

from __future__ import annotations

from typing import NamedTuple

import tensorflow as tf


class StoredTable(NamedTuple):
    """A table's variables, by their handles.

    Attributes:
        rows: the handle of [rows, dim]; of int4, uint8 [rows, (dim + 1) // 2].
        dtype: the variable's dtype.
        dim: the number of columns.
        scale: the handle of [rows, 1] float32, the rows' factors if they are
            int8 or int4; else None.
    """

    rows: tf.Tensor
    dtype: tf.DType
    dim: int
    scale: tf.Tensor | None = None

    def gather(self, ids: tf.Tensor) -> tf.Tensor:
        """Reads the rows `ids` [n]: [n, dim] float32."""
        width = stored_width(self.dtype, self.dim)
        rows = _gather(self.rows, ids, self.dtype, width)
        if self.scale is None:
            return tf.cast(rows, tf.float32)
        scale = _gather(self.scale, ids, tf.float32, 1)
        return decode(rows, self.dim) * scale


def stored_width(dtype: tf.DType, dim: int) -> int:
    """Returns the number of columns in which `dim` numbers are stored."""
    return (dim + 1) // 2 if dtype == tf.uint8 else dim


def decode(rows: tf.Tensor, dim: int) -> tf.Tensor:
    """Returns rows of int8 or int4 as float32 integers, [n, dim].

    Args:
        rows: int8 [n, dim]; of int4, uint8 [n, (dim + 1) // 2]: byte j has
            column j in its lower four bits and column j + (dim + 1) // 2 in the
            others, each plus 8.
        dim: the number of columns.
    """
    if rows.dtype != tf.uint8:
        return tf.cast(rows, tf.float32)
    lower = tf.bitwise.bitwise_and(rows, tf.constant(15, tf.uint8))
    upper = tf.bitwise.right_shift(rows, tf.constant(4, tf.uint8))
    values = tf.cast(tf.concat([lower, upper], 1), tf.float32) - 8.0
    return values[:, :dim] if dim % 2 else values


def _gather(
    handle: tf.Tensor, ids: tf.Tensor, dtype: tf.DType, width: int
) -> tf.Tensor:
    rows = tf.raw_ops.ResourceGather(resource=handle, indices=ids, dtype=dtype)
    rows.set_shape([None, width])
    return rows
