"""The formats in which an exported model stores rows of tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.rows import SCALE
from tfrs_embed.ops.update import PARAMETERS


class RowFormat:
    """Stores float32 rows as a dtype of floats, and gives them back.

    Args:
        dtype: the dtype.

    Attributes:
        dtypes: the dtype of each of a table's variables, by name.
    """

    def __init__(self, dtype: tf.DType) -> None:
        self.dtypes = {PARAMETERS: dtype}

    def encode(self, table: str, rows: tf.Tensor) -> dict[str, tf.Tensor]:
        """The values that are stored for rows.

        Args:
            table: the table's name, for errors.
            rows: [n, dim] float32.

        Returns:
            These rows of each variable, by name.

        Raises:
            ValueError: the rows can't be stored.
        """
        dtype = self.dtypes[PARAMETERS]
        if dtype == tf.float32:
            return {PARAMETERS: rows}
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

    def gather(self, variables: Mapping[str, Any], ids: tf.Tensor) -> tf.Tensor:
        """Returns rows, [n, dim] float32; reads no others."""
        return tf.cast(tf.gather(variables[PARAMETERS], ids), tf.float32)


class _Int8(RowFormat):
    """Rows of 8 bit integers, and a float32 for each row to multiply them by.

    That is the row's largest magnitude / 127, so that a number is off by half
    of it at most.
    """

    def __init__(self) -> None:
        self.dtypes = {PARAMETERS: tf.int8, SCALE: tf.float32}

    def encode(self, table: str, rows: tf.Tensor) -> dict[str, tf.Tensor]:
        if not bool(tf.reduce_all(tf.math.is_finite(rows))):
            raise ValueError(
                f"Table '{table}' can't be exported with int8 rows: it holds "
                "values that are infinite or not a number."
            )
        scale = tf.reduce_max(tf.abs(rows), 1, keepdims=True) / 127.0
        steps = tf.round(tf.math.divide_no_nan(rows, scale))
        return {
            PARAMETERS: tf.cast(tf.clip_by_value(steps, -127, 127), tf.int8),
            SCALE: scale,
        }

    def gather(self, variables: Mapping[str, Any], ids: tf.Tensor) -> tf.Tensor:
        return super().gather(variables, ids) * tf.gather(variables[SCALE], ids)


#: The formats by the name that users give.
FORMATS: dict[str, RowFormat] = {
    "float32": RowFormat(tf.float32),
    "bfloat16": RowFormat(tf.bfloat16),
    "float16": RowFormat(tf.float16),
    "int8": _Int8(),
}
