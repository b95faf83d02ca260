"""A bijection of 64 bits that mixes them, and its inverse.

It is splitmix64's: a step of the state, and the finaliser (Steele, Lea and
Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014). Each bit
of the result depends on all bits of the number. Both directions are a few
elementwise operations, which GPUs have too.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_INVERSES = tuple(pow(factor, -1, 1 << 64) for factor in _FACTORS)


def mix(z: tf.Tensor) -> tf.Tensor:
    """Mixes numbers, uint64 of any shape."""
    z = _fold(z + uint64(_GOLDEN), 30) * uint64(_FACTORS[0])
    return _fold(_fold(z, 27) * uint64(_FACTORS[1]), 31)


def unmix(z: tf.Tensor) -> tf.Tensor:
    """Returns the numbers that `mix` made others of, uint64 of any shape."""
    z = _fold(_fold(z, 31), 62) * uint64(_INVERSES[1])
    z = _fold(_fold(z, 27), 54) * uint64(_INVERSES[0])
    return _fold(_fold(z, 30), 60) - uint64(_GOLDEN)


def _fold(z: tf.Tensor, by: int) -> tf.Tensor:
    """Adds higher bits to lower ones; once more by 2 * by undoes it."""
    return tf.bitwise.bitwise_xor(z, tf.bitwise.right_shift(z, uint64(by)))


def uint64(value: int) -> tf.Tensor:
    """A scalar of 64 bits."""
    return tf.constant(np.uint64(value))
