"""The rows of an exported model's tables: how they are stored, and read.

Rows of "int8" are 8 bit integers, with a float32 scale for each row to multiply
them by: the row's largest magnitude / 127, so that a number is off by half of
it at most.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.rows import SCALE
from tfrs_embed.ops.update import PARAMETERS

#: The dtypes that rows may be stored in, by the name that users give.
DTYPES: dict[str, tf.DType] = {
    each.name: each for each in (tf.float32, tf.bfloat16, tf.float16, tf.int8)
}


def encode(
    table: str, rows: tf.Tensor, dtype: tf.DType
) -> dict[str, tf.Tensor]:
    """The values that are stored for rows.

    Args:
        table: the table's name, for errors.
        rows: [n, dim] float32.
        dtype: one of `DTYPES`.

    Returns:
        These rows of each variable, by name.

    Raises:
        ValueError: the rows can't be stored.
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
    # NaN stays NaN, and does not spoil the other rows' check.
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
    """Returns rows, [n, dim] float32, of a table's variables; reads no others.

    Args:
        variables: the table's variables by name.
        ids: [n], the rows' numbers.
    """
    rows = tf.cast(tf.gather(variables[PARAMETERS], ids), tf.float32)
    return (
        rows * tf.gather(variables[SCALE], ids) if SCALE in variables else rows
    )
