"""The dtype in which rows, vectors and gradients are sent."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.arguments import dtype_name
from tfrs_embed.distribution.exchange_kind import ELEMENT_SIZES


def communication_dtype(value: Any) -> str:
    """Checks an argument for the dtype in which rows and gradients are sent."""
    return dtype_name(value, ELEMENT_SIZES, "communication_dtype")


@dataclasses.dataclass(frozen=True)
class Wire:
    """Converts float32 numbers to the dtype in which they are sent, and back.

    A number is rounded to the nearest, ties to even: by at most 2^-8 of it as
    bfloat16, and 2^-11 as float16, whose numbers below 2^-14 are rounded by at
    most 2^-25. In float16, numbers from 65,520 on become infinite. NaN and
    infinity stay. Rounding twice changes nothing.

    Attributes:
        name: the dtype, one of `ELEMENT_SIZES`.
    """

    name: str = "float32"

    @property
    def dtype(self) -> tf.DType:
        """The numbers' dtype."""
        return tf.as_dtype(self.name)

    @property
    def size(self) -> int:
        """The bytes of a number."""
        return ELEMENT_SIZES[self.name]

    def of_rows(self, dtype: tf.DType) -> Wire:
        """Returns the wire for rows of a dtype; rows of two bytes stay."""
        return Wire(dtype.name) if dtype.size < tf.float32.size else self

    def encode(self, values: tf.Tensor) -> tf.Tensor:
        """Casts values, float32 or of `dtype` already, to `dtype`."""
        return tf.cast(values, self.dtype)

    def decode(self, sent: tf.Tensor) -> tf.Tensor:
        """Casts encoded values to float32."""
        return tf.cast(sent, tf.float32)
