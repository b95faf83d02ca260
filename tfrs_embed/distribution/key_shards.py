"""The shards of keys, where a table of keys is spread over replicas.

Ids come in steps: multiples of 1,000, or pairs of numbers in one of 64 bits.
Key modulo shards would fill one shard and leave the others empty. So each key
has a number, a mixture of its bits. The shard is number % world, and number //
world is sent to it. From these the shard computes the key again.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from tfrs_embed.mixing import mix, unmix


def numbers_of(keys: tf.Tensor, world: int) -> tf.Tensor:
    """The numbers by which keys are sent to their shards.

    Args:
        keys: int64, of any shape and value.
        world: the number of shards; with one, a key is its own number.

    Returns:
        int64 of the same shape; keys that differ have numbers that differ.
    """
    if world == 1:
        return keys
    return tf.bitcast(mix(tf.bitcast(keys, tf.uint64)), tf.int64)


def keys_of(numbers: tf.Tensor, world: int) -> tf.Tensor:
    """The keys that have these numbers; see `numbers_of`."""
    if world == 1:
        return numbers
    return tf.bitcast(unmix(tf.bitcast(numbers, tf.uint64)), tf.int64)


def shards_of(keys: np.ndarray, world: int) -> np.ndarray:
    """The shards of keys, [n] int64, as [n] int32; executes eagerly."""
    with tf.device("CPU:0"):
        numbers = numbers_of(tf.constant(keys, tf.int64), world).numpy()
    return np.mod(numbers, world).astype(np.int32)
