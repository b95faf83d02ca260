"""Stores and reads the rows of an exported model's tables.

Rows of "int8" are 8 bit integers and a float32 scale for each row, the row's
largest magnitude / 127. The largest error of a number is half of the scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.rows import SCALE
from tfrs_embed.ops.update import PARAMETERS

#: The dtypes of stored rows by name.
DTYPES: dict[str, tf.DType] = {
    each.name: each for each in (tf.float32, tf.bfloat16, tf.float16, tf.int8)
}


def encode(
    table: str, rows: tf.Tensor, dtype: tf.DType
) -> dict[str, tf.Tensor]:
    """Encodes rows, [n, dim] float32: values of the table's variables by name.

    Raises a ValueError if the rows have values that the dtype can't hold.
    """
    if dtype == tf.float32:
        return {PARAMETERS: rows}
    if dtype == tf.int8:
        if not bool(tf.reduce_all(tf.math.is_finite(rows))):
            raise ValueError(
                f"Table '{table}' can't be exported with int8 rows: it holds "
                "values that are infinite or not a number."
            )
        scale = tf.reduce_max(tf.abs(rows), 1, keepdims=True) / 127.0
        steps = tf.round(tf.math.divide_no_nan(rows, scale))
        steps = tf.cast(tf.clip_by_value(steps, -127, 127), tf.int8)
        return {PARAMETERS: steps, SCALE: scale}
    # NaN stays NaN. The largest magnitude is of the other values.
    known = tf.where(tf.math.is_nan(rows), 0.0, rows)
    # Python's floats: numpy would compare in the narrow dtype.
    largest = float(tf.reduce_max(tf.abs(known)))
    if largest > float(dtype.max):
        raise ValueError(
            f"Table '{table}' can't be exported with {dtype.name} rows: it "
            f"holds a value of magnitude {largest:g}, and the largest is "
            f"{float(dtype.max):g}."
        )
    return {PARAMETERS: tf.cast(rows, dtype)}


def gather(variables: Mapping[str, Any], ids: tf.Tensor) -> tf.Tensor:
    """Reads the rows `ids` [n] of a table's variables: [n, dim] float32."""
    rows = tf.cast(tf.gather(variables[PARAMETERS], ids), tf.float32)
    return (
        rows * tf.gather(variables[SCALE], ids) if SCALE in variables else rows
    )
