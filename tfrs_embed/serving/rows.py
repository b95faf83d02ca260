"""Stores and reads the rows of an exported model's tables.

Rows of "int8" and "int4" are integers of 8 or 4 bits and a float32 scale for
each row, the row's largest magnitude / 127 or 7. The largest error of a number
is half of the scale. Two integers of 4 bits are a byte; see
`ops.stored_table.decode`.
"""

from __future__ import annotations

import tensorflow as tf

from tfrs_embed.checkpoint.rows import SCALE
from tfrs_embed.ops.update import PARAMETERS

#: The dtypes of stored rows by name. Those of "int4" are bytes of two integers.
DTYPES: dict[str, tf.DType] = {
    "float32": tf.float32,
    "bfloat16": tf.bfloat16,
    "float16": tf.float16,
    "int8": tf.int8,
    "int4": tf.uint8,
}

#: The largest integers, and the names, of rows that have a scale.
_INTEGERS = {tf.int8: (127, "int8"), tf.uint8: (7, "int4")}


def has_scale(dtype: tf.DType) -> bool:
    """Whether rows of a dtype have a scale each."""
    return dtype in _INTEGERS


def encode(
    table: str, rows: tf.Tensor, dtype: tf.DType
) -> dict[str, tf.Tensor]:
    """Encodes rows, [n, dim] float32: values of the table's variables by name.

    Raises a ValueError if the rows have values that the dtype can't hold.
    """
    if dtype == tf.float32:
        return {PARAMETERS: rows}
    if dtype in _INTEGERS:
        most, name = _INTEGERS[dtype]
        if not bool(tf.reduce_all(tf.math.is_finite(rows))):
            raise ValueError(
                f"Table '{table}' can't be exported with {name} rows: it holds "
                "values that are infinite or not a number."
            )
        scale = tf.reduce_max(tf.abs(rows), 1, keepdims=True) / most
        steps = tf.round(tf.math.divide_no_nan(rows, scale))
        steps = tf.cast(tf.clip_by_value(steps, -most, most), tf.int8)
        stored = steps if dtype == tf.int8 else _pack(steps)
        return {PARAMETERS: stored, SCALE: scale}
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


def _pack(steps: tf.Tensor) -> tf.Tensor:
    """Packs integers of [-7, 7], [n, dim], into [n, (dim + 1) // 2] bytes."""
    biased = tf.cast(steps + 8, tf.uint8)
    # Integers are at least 1: a 0 in the last byte's upper half is none.
    lower, upper = tf.split(
        tf.pad(biased, [[0, 0], [0, steps.shape[1] % 2]]), 2, 1
    )
    return lower + upper * 16
