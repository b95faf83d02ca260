"""Rows of two bytes: as float32, and rounded back.

Tables of bfloat16 or float16 compute in float32. New rows are rounded
stochastically: to one of the two neighbouring numbers, with the probabilities
that make the value the mean. So updates smaller than half a step between
numbers accumulate on average, where rounding to nearest loses them. Gupta et
al. 2015, "Deep Learning with Limited Numerical Precision".

The random bits are a hash of the table's seed, the update's number, and the row
and column in the whole table. So they don't depend on device, kernels, sharding
or copies. The hashes are `tfrs_mix` of kernels/cc/rows.h and `RandomBits` of
kernels/cc/rows.cc.
"""

from __future__ import annotations

import zlib
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from tfrs_embed.configs.tables import TableSpec

_GOLDEN = 0x9E3779B97F4A7C15
_LOW = 0xFFFFFFFF


class Rounding(NamedTuple):
    """The rounding of new rows of a table, or of a part of it.

    Attributes:
        stochastic: whether by random bits; if not, to nearest.
        seed: the table's.
        first_row: the part's first row in the whole table.
        row_stride: the distance of the part's rows in the whole table.
        first_column: the part's first column in the whole table.
    """

    stochastic: bool = False
    seed: int = 0
    first_row: int = 0
    row_stride: int = 1
    first_column: int = 0


def of_part(
    table: TableSpec,
    first_row: int = 0,
    row_stride: int = 1,
    first_column: int = 0,
) -> Rounding:
    """Returns the rounding of a table's part."""
    stochastic = table.dtype != "float32" and table.rounding == "stochastic"
    seed = seed_of(table.name)
    return Rounding(stochastic, seed, first_row, row_stride, first_column)


def seed_of(table: str) -> int:
    """Returns the seed of a table's random bits."""
    return zlib.crc32(table.encode())


def widen(rows: tf.Tensor) -> tf.Tensor:
    """Returns rows of any table's dtype as float32."""
    return rows if rows.dtype == tf.float32 else tf.cast(rows, tf.float32)


def narrow(
    rows: tf.Tensor,
    dtype: tf.DType,
    rounding: Rounding,
    step: tf.Tensor,
    numbers: tf.Tensor,
) -> tf.Tensor:
    """Rounds new rows, [n, dim] float32, to a table's dtype.

    Values beyond its largest number round to nearest, possibly infinity; NaN
    stays. `step`, scalar int64, is the number of earlier updates; `numbers`,
    [n], are the rows' numbers in the part.
    """
    if dtype == tf.float32:
        return rows
    if not rounding.stochastic:
        return tf.cast(rows, dtype)
    random = random_bits(rounding, step, numbers, rows.shape[1])
    # int64 has operations on all devices, int32 has not.
    bits = tf.cast(tf.bitcast(rows, tf.uint32), tf.int64)
    magnitude = bits & 0x7FFFFFFF
    if dtype == tf.bfloat16:
        half = _right(magnitude + _right(random, 16), 16)
        most = 0x7F7F0000
    else:
        half = _float16(rows, magnitude, random)
        most = 0x477FE000
    half |= _right(bits, 16) & 0x8000
    rounded = tf.bitcast(tf.cast(half, tf.uint16), dtype)
    return tf.where(magnitude > most, tf.cast(rows, dtype), rounded)


def _float16(
    rows: tf.Tensor, magnitude: tf.Tensor, random: tf.Tensor
) -> tf.Tensor:
    """Returns the bits of the rounded float16 numbers, without signs."""
    normal = _right(magnitude - 0x38000000 + _right(random, 19), 13)
    # Below 2^-14 the steps are of 2^-24 each, of which 21 bits are kept.
    denormal = magnitude < 0x38800000
    steps = tf.where(denormal, tf.abs(rows), tf.zeros_like(rows)) * 2.0**45
    small = _right(_as_int64(steps) + _right(random, 11), 21)
    return tf.where(denormal, small, normal)


def random_bits(
    rounding: Rounding, step: tf.Tensor, numbers: tf.Tensor, dim: int
) -> tf.Tensor:
    """Returns random bits of a part's rows and `dim` columns, [n, dim] int64.

    They are below 2^32; higher bits are better. Arguments are those of
    `narrow`.
    """
    stream = _mix(_mix(_int64(rounding.seed)) ^ _as_int64(step))
    row = rounding.first_row + _as_int64(numbers) * rounding.row_stride
    key = _right(_mix(stream ^ row), 32) & _LOW
    columns = np.arange(dim, dtype=np.int64) + rounding.first_column
    columns = tf.constant(columns * (_GOLDEN >> 32) % (1 << 32), tf.int64)
    x = (key[:, None] + columns) & _LOW
    x ^= _right(x, 15)
    return (x * 0x846CA68B) & _LOW


def _mix(z: tf.Tensor) -> tf.Tensor:
    """Returns splitmix64's next number of a state, as int64 of its bits."""
    z += _int64(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z ^= _unsigned_right(z, shift)
        z *= _int64(factor)
    return z ^ _unsigned_right(z, 31)


def _unsigned_right(z: tf.Tensor, by: int) -> tf.Tensor:
    # int64's own shift copies the sign.
    return _right(z, by) & ((1 << (64 - by)) - 1)


def _right(z: tf.Tensor, by: int) -> tf.Tensor:
    return tf.bitwise.right_shift(z, _int64(by))


def _as_int64(value: tf.Tensor) -> tf.Tensor:
    return tf.cast(value, tf.int64)


def _int64(value: int) -> tf.Tensor:
    return tf.constant(np.uint64(value).astype(np.int64))
