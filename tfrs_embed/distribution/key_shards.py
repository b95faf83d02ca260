"""The shards of keys, if replicas share a table with keys.

Ids may have a pattern: multiples of 1,000, or pairs of numbers in 64 bits. Key
modulo shards would then fill one shard and leave others empty. So each key is
mapped to a number by a hash without collisions. The key's shard is number %
world. The shard gets number // world, and computes the key from both. With
`KeysOfShards` a key is its number: programs size these shards for key % world.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.graphs import TracedOnce

# One round of splitmix64's finaliser (Steele, Lea and Flood, "Fast splittable
# pseudorandom number generators", OOPSLA 2014): two shifts and a factor. There
# and back it takes 14 operations, the whole finaliser 24.
_SHIFTS = (30, 31)
_FACTOR = 0xBF58476D1CE4E5B9
_INVERSE = pow(_FACTOR, -1, 1 << 64)


def numbers_of(keys: tf.Tensor, world: int, mixed: bool = True) -> tf.Tensor:
    """Returns the numbers that decide keys' shards, int64 of the same shape.

    Different keys have different numbers. With one shard, and without `mixed`,
    a key is its number.
    """
    if world == 1 or not mixed:
        return keys
    numbers = _MIX(keys)
    numbers.set_shape(keys.shape)
    return numbers


def keys_of(numbers: tf.Tensor, world: int, mixed: bool = True) -> tf.Tensor:
    """Returns the keys with these numbers; the inverse of `numbers_of`."""
    if world == 1 or not mixed:
        return numbers
    keys = _UNMIX(numbers)
    keys.set_shape(numbers.shape)
    return keys


def shards_of(keys: np.ndarray, world: int, mixed: bool = True) -> np.ndarray:
    """Returns keys' shards, [n] int64, as [n] int32; also while tracing."""
    with tf.init_scope(), tf.device("CPU:0"):
        numbers = numbers_of(tf.constant(keys, tf.int64), world, mixed)
    return np.mod(numbers.numpy(), world).astype(np.int32)


def shared_rows_of(keys: tf.Tensor, rows: int, world: int) -> tf.Tensor:
    """Returns which of `rows` rows a key shares: the row's index on its shard.

    Keys are [n] int64, and have their shards by a hash. Row g of all is row
    g // world of shard g % world, the shard of all its keys: `world` must
    divide `rows`. Any other number of shards gives the same keys the same row.
    """
    numbers = _MIX(keys)
    numbers.set_shape(keys.shape)
    return tf.math.floordiv(tf.math.floormod(numbers, rows), world)


def _mix(keys: tf.Tensor) -> tf.Tensor:
    z = _fold(tf.bitcast(keys, tf.uint64), _SHIFTS[0]) * _uint64(_FACTOR)
    return tf.bitcast(_fold(z, _SHIFTS[1]), tf.int64)


def _unmix(numbers: tf.Tensor) -> tf.Tensor:
    z = _unfold(tf.bitcast(numbers, tf.uint64), _SHIFTS[1]) * _uint64(_INVERSE)
    return tf.bitcast(_unfold(z, _SHIFTS[0]), tf.int64)


# Each is traced once for all tables.
_MIX = TracedOnce(_mix, tf.TensorSpec(None, tf.int64))
_UNMIX = TracedOnce(_unmix, tf.TensorSpec(None, tf.int64))


def _fold(z: tf.Tensor, by: int) -> tf.Tensor:
    """Mixes higher bits into lower ones."""
    return tf.bitwise.bitwise_xor(z, tf.bitwise.right_shift(z, _uint64(by)))


def _unfold(z: tf.Tensor, by: int) -> tf.Tensor:
    """Inverts `_fold`, if 3 * by is at least 64."""
    return _fold(_fold(z, by), 2 * by)


def _uint64(value: int) -> tf.Tensor:
    return tf.constant(np.uint64(value))
