"""The initial rows of keys, each computed from the key and the table's seed.

A key starts with the same values at any time, on any row and replica, also
after an eviction. An initializer makes many rows together, so this module draws
from the initializer's distribution instead: number j of key k is a hash of
(seed, k, j), taken for a uniform number and mapped to the distribution.

The hash is the finaliser of splitmix64 (Steele, Lea and Flood, "Fast splittable
pseudorandom number generators", OOPSLA 2014).
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import graphs
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.storage.initial_values import (
    TAIL,
    checked,
    constant_of,
    distribution_of,
    parameters,
)
from tfrs_embed.storage.row_store import HOST

#: Makes initial rows, [n, dim] float32, of keys, [n] int64.
Maker = Callable[[tf.Tensor], tf.Tensor]

# A multiple of the vector length of every processor.
_PACKET = 64
_GOLDEN = 0x9E3779B97F4A7C15


def seed_of(table: TableSpec) -> int:
    """Returns the seed of a table's keys, 64 bits.

    It is the initializer's. Without one it is computed from the table's name,
    and its layer's where several tables have one name.
    """
    initializer = table.initializer
    # Keras 3 picks a seed if none is given, and keeps the given one apart.
    given = getattr(
        initializer, "_init_seed", getattr(initializer, "seed", None)
    )
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool):
        return int(given) % 2**64
    path = [table.owner, table.name] if table.owner else [table.name]
    return zlib.crc32("/".join(path).encode())


def maker(table: TableSpec) -> Maker:
    """Returns a function that makes the initial rows of a table's keys.

    Raises:
        ValueError: the initializer can't make single rows. These can: TF's and
            Keras's zeros, ones, constants of one number, uniform, normal,
            truncated normal and variance scaling; and a callable with a
            parameter `keys`, which gets the shape [n, dim] and the keys, [n]
            int64.
    """
    initializer, dim = table.initializer, table.dim
    if "keys" in parameters(initializer):
        return graphs.TracedOnce(
            lambda keys: _called(table, keys), tf.TensorSpec([None], tf.int64)
        )
    constant = constant_of(initializer)
    if constant is not None:
        return lambda keys: tf.fill([tf.size(keys), dim], constant)
    distribution = distribution_of(initializer, (table.vocabulary_size, dim))
    if distribution is None:
        raise ValueError(
            f"Table '{table.name}': the initial row of a key depends on the "
            "key alone, and an initializer of the kind "
            f"{type(initializer).__name__} can't make that. Take a constant, "
            "uniform, normal or truncated normal one, one that scales the "
            "variance, or a function with a parameter named 'keys'."
        )
    return _Drawn(*distribution, seed_of(table), dim)


@dataclasses.dataclass(frozen=True)
class _Drawn:
    """Draws rows of a table's keys; for the rest see `distribution_of`."""

    kind: str
    first: float
    scale: float
    seed: int
    dim: int

    def __call__(self, keys: tf.Tensor) -> tf.Tensor:
        return _draw_rows([self], None, keys)


def make_rows(
    makers: Sequence[Maker], keys: tf.Tensor, sizes: tf.Tensor
) -> tf.Tensor:
    """Makes the initial rows of several tables' keys, [n, dim] float32.

    The tables have one width. Keys, [n] int64, are in the order of the tables;
    `sizes`, [tables] int64, says how many each table has.
    """
    number = len(makers)
    if number == 1:
        return makers[0](keys)
    drawn = [m for m in makers if isinstance(m, _Drawn)]
    if len(drawn) == number and len({m.kind for m in drawn}) == 1:
        return _draw_rows(drawn, sizes, keys)
    parts = tf.split(keys, sizes, num=number)
    return tf.concat(
        [make(part) for make, part in zip(makers, parts, strict=True)], 0
    )


def _draw_rows(
    makers: Sequence[_Drawn], sizes: tf.Tensor | None, keys: tf.Tensor
) -> tf.Tensor:
    """Draws rows of several tables, from distributions of one kind."""
    with tf.device(HOST):
        parameters = [
            tf.constant([m.seed for m in makers], tf.uint64),
            tf.constant([m.first for m in makers], tf.float32),
            tf.constant([m.scale for m in makers], tf.float32),
        ]
        if sizes is not None:
            places = tf.range(tf.size(keys, tf.int64))
            table_of = tf.searchsorted(tf.cumsum(sizes), places, side="right")
            parameters = [tf.gather(p, table_of) for p in parameters]
        dim = makers[0].dim
        rows = _DRAW[makers[0].kind](*parameters, tf.constant(dim), keys)
        return tf.ensure_shape(rows, [None, dim])


def _called(table: TableSpec, keys: tf.Tensor) -> tf.Tensor:
    """Makes rows of keys by calling the initializer."""
    shape = tf.stack([tf.size(keys), table.dim])
    rows = table.initializer(shape, keys=keys)
    rows = checked(table, rows, [keys.shape[0], table.dim])
    return tf.ensure_shape(rows, [None, table.dim])


def _draw(
    kind: str,
    seed: tf.Tensor,
    first: tf.Tensor,
    scale: tf.Tensor,
    dim: tf.Tensor,
    keys: tf.Tensor,
) -> tf.Tensor:
    """Draws numbers for keys, [n] int64: [n, dim] float32.

    Seeds, uint64, and `first` and `scale`, float32, are [n] or [1]. These are
    the least number and the range of a uniform distribution, and the mean and
    the standard deviation of "normal" and "truncated_normal".
    """
    with tf.device(HOST):
        numbers = tf.reshape(_uniform(seed, keys, dim), [-1])
        size = tf.size(numbers)
        # The rest of an unfilled vector would be rounded differently.
        numbers = tf.pad(numbers, [[0, -size % _PACKET]])
        if kind == "truncated_normal":
            numbers = TAIL + (1 - 2 * TAIL) * numbers
        if kind != "uniform":
            numbers = tf.math.ndtri(numbers)
        rows = tf.reshape(numbers[:size], [-1, dim])
        return first[:, None] + scale[:, None] * rows


def _uniform(seed: tf.Tensor, keys: tf.Tensor, dim: tf.Tensor) -> tf.Tensor:
    """Returns numbers in (0, 1) for keys, [n] int64: [n, dim] float32."""
    key = _mix(tf.bitcast(keys, tf.uint64))
    state = _mix(tf.bitwise.bitwise_xor(seed, key))
    bits = _mix(state[:, None] + tf.cast(tf.range(dim), tf.uint64))
    # 23 bits, plus a half for the middle of their interval, fit a float32.
    steps = tf.cast(tf.bitwise.right_shift(bits, _uint64(41)), tf.float32)
    return (steps + 0.5) * 2.0**-23


# All tables share these, so each is traced once.
_DRAW = {
    kind: graphs.TracedOnce(
        functools.partial(_draw, kind),
        tf.TensorSpec([None], tf.uint64),
        tf.TensorSpec([None], tf.float32),
        tf.TensorSpec([None], tf.float32),
        tf.TensorSpec([], tf.int32),
        tf.TensorSpec([None], tf.int64),
        **graphs.NOT_INLINED,
    )
    for kind in ("uniform", "normal", "truncated_normal")
}


def _mix(z: tf.Tensor) -> tf.Tensor:
    """Returns splitmix64's next number after a state, uint64."""
    z += _uint64(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = tf.bitwise.bitwise_xor(z, tf.bitwise.right_shift(z, _uint64(shift)))
        z *= _uint64(factor)
    return tf.bitwise.bitwise_xor(z, tf.bitwise.right_shift(z, _uint64(31)))


def _uint64(value: int) -> tf.Tensor:
    return tf.constant(np.uint64(value))
