"""A table's initial rows, made block by block.

A block's size and values depend on the table only. So a table starts with the
same values for every sharding, and no process holds the whole table.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import keras_versions, progress
from tfrs_embed.compat.private_tensorflow import init_ops_v2
from tfrs_embed.configs.tables import TableSpec, bytes_of
from tfrs_embed.storage import allocation

#: The most float32 numbers of a block, unless one row has more: 16 MiB.
BLOCK_ELEMENTS = 1 << 22

_PARTITION = {"partition_shape", "partition_offset"}

# The arguments that TF's and Keras's random initializers share. Other random
# initializers are subclasses that fill in arguments.
_SAMPLERS = {
    "RandomNormal": ("mean", "stddev", "seed"),
    "RandomUniform": ("minval", "maxval", "seed"),
    "TruncatedNormal": ("mean", "stddev", "seed"),
    "VarianceScaling": ("scale", "mode", "distribution", "seed"),
}

# Keras draws again beyond so many standard deviations,
_TRUNCATED_AT = 2.0
# which leaves this part of the standard deviation.
_TRUNCATED_STDDEV = 0.87962566103423978
#: The part of a normal distribution on either side that truncation leaves out.
TAIL = math.erfc(_TRUNCATED_AT / math.sqrt(2)) / 2

_Shape = tuple[int, int]


def initial_blocks(table: TableSpec) -> Iterator[tuple[int, tf.Tensor]]:
    """Yields a table's initial rows in order, block by block.

    A table of at most `BLOCK_ELEMENTS` numbers is one block: the initializer's
    result. A larger table has blocks of equally many rows, and a rest. TF's and
    Keras's constants and random initializers make single blocks; their values
    differ from those of one call, their distribution does not. (A truncated
    normal is the inverse of its distribution at uniform numbers, which takes
    half of the time of drawing again beyond the limit.) So do callables
    with parameters named `partition_shape` and `partition_offset`, as TF and
    Keras define them. (A `**kwargs` is not enough: most callables ignore it.)
    Others are called once for the whole table, which the host holds until the
    last block is taken.

    A seeded initializer of TF's or Keras's yields the same values each time, in
    every process. Without a seed, values may differ each time.

    Yields:
        The index of the block's first row, and its rows, [n, dim] of the
        table's dtype, to which float32 values are rounded to the nearest.

    Raises:
        ValueError: the initializer returned another shape or dtype, or numbers
            beyond the table's dtype.
    """
    shape = (table.vocabulary_size, table.dim)
    total = math.prod(shape) * bytes_of(table)
    with (
        allocation.naming(f"Table '{table.name}'", shape, table.dtype, 0, None),
        progress.Task("Building", f"table '{table.name}'", total) as task,
    ):
        make = _block_maker(table, shape)
        size = max(1, BLOCK_ELEMENTS // table.dim)
        for first in range(0, table.vocabulary_size, size):
            block = (min(size, table.vocabulary_size - first), table.dim)
            rows = checked(table, make(first, block), block, first)
            yield first, _rounded(table, rows, first)
            # The caller has stored the rows.
            task.advance(math.prod(block) * bytes_of(table))


def _block_maker(table: TableSpec, shape: _Shape) -> Callable[..., Any]:
    """Returns a function that makes a block: f(first row, block's shape)."""
    initializer = table.initializer
    if math.prod(shape) <= BLOCK_ELEMENTS:
        return lambda first, block: _call(initializer, shape)
    if constant_of(initializer) is not None:
        return lambda first, block: initializer(block, tf.float32)
    for name in _SAMPLERS:
        if calls_as(initializer, name):
            return _sampler(initializer, name, shape)
    if parameters(initializer) >= _PARTITION:
        return lambda first, block: _call(
            initializer,
            shape,
            partition_shape=block,
            partition_offset=(first, 0),
        )
    with tf.device("CPU:0"):
        whole = checked(table, _call(initializer, shape), shape)

    def cut(first: int, block: _Shape) -> tf.Tensor:
        with tf.device("CPU:0"):
            return whole[first : first + block[0]]

    return cut


def _sampler(initializer: Any, name: str, shape: _Shape) -> Callable[..., Any]:
    """Returns a function that makes blocks of a random initializer.

    Calling the initializer runs the code of the class `name`.
    """
    own = keras_versions.keras_of(initializer)
    of_keras_3 = own is not None and own.__name__ == keras_versions.KERAS_3
    kind, mean, stddev = distribution_of(initializer, shape) or ("", 0.0, 0.0)
    if kind == "truncated_normal":
        uniform = (own.initializers if own else init_ops_v2).RandomUniform
        draw = _sampler(
            uniform(TAIL, 1 - TAIL, initializer.seed), "RandomUniform", shape
        )
        return lambda first, block: (
            mean + stddev * tf.math.ndtri(draw(first, block))
        )
    if (
        isinstance(initializer, init_ops_v2.Initializer)
        and initializer.seed is not None
    ):
        # TF's would repeat its values in each block. tf_keras's mixes the
        # offset into the seed, and gives the same values without partitions.
        keras: Any = importlib.import_module(keras_versions.TF_KERAS)
        kind = getattr(keras.initializers, name)
        initializer = kind(
            **{f: getattr(initializer, f) for f in _SAMPLERS[name]}
        )

    def sample(first: int, block: _Shape) -> tf.Tensor:
        if of_keras_3:
            rows = _of_block(initializer, first)(block, tf.float32)
        else:
            rows = initializer(
                block,
                tf.float32,
                partition_shape=block,
                partition_offset=(first, 0),
            )
        if name == "VarianceScaling":
            # TF's would take the fans of the table's shape, Keras's takes those
            # of the block. Both got the block's shape.
            fans = fan_of(initializer, block) / fan_of(initializer, shape)
            rows *= math.sqrt(fans)
        return rows

    return sample


def _of_block(initializer: Any, first: int) -> Any:
    """Returns an initializer of Keras 3, without partitions, for one block."""
    if not first or not isinstance(initializer.seed, int):
        return initializer
    # It would repeat its values in each block.
    mixed = np.random.SeedSequence([initializer.seed, first])
    seed = int(mixed.generate_state(1)[0] >> 1)
    config = {**initializer.get_config(), "seed": seed}
    return type(initializer).from_config(config)


def distribution_of(
    initializer: Any, shape: _Shape
) -> tuple[str, float, float] | None:
    """Returns the kind of a random initializer's distribution, and two numbers.

    These are the least number and the range of "uniform", and the mean and the
    standard deviation, before truncation, of "normal" and "truncated_normal".
    `shape` is the table's. None: it is not one of TF's or Keras's.
    """
    if calls_as(initializer, "RandomUniform"):
        low, high = initializer.minval, initializer.maxval
        return "uniform", low, high - low
    if calls_as(initializer, "RandomNormal"):
        return "normal", initializer.mean, initializer.stddev
    if calls_as(initializer, "TruncatedNormal"):
        return "truncated_normal", initializer.mean, initializer.stddev
    if not calls_as(initializer, "VarianceScaling"):
        return None
    variance = initializer.scale / max(1.0, fan_of(initializer, shape))
    if initializer.distribution == "uniform":
        limit = math.sqrt(3 * variance)
        return "uniform", -limit, 2 * limit
    stddev = math.sqrt(variance)
    if initializer.distribution == "untruncated_normal":
        return "normal", 0.0, stddev
    return "truncated_normal", 0.0, stddev / _TRUNCATED_STDDEV


def fan_of(initializer: Any, shape: _Shape) -> float:
    """Returns the fan by which a `VarianceScaling` divides."""
    fans = {"fan_in": shape[0], "fan_out": shape[1]}
    return fans.get(initializer.mode, sum(shape) / 2)


def constant_of(initializer: Any) -> float | None:
    """Returns the number with which an initializer fills rows, if any."""
    if calls_as(initializer, "Zeros"):
        return 0.0
    if calls_as(initializer, "Ones"):
        return 1.0
    if calls_as(initializer, "Constant") and np.ndim(initializer.value) == 0:
        return float(initializer.value)
    return None


def calls_as(initializer: Any, *names: str) -> bool:
    """Whether calling it runs the code of one of TF's or Keras's classes.

    A subclass with its own `__call__` does not.
    """
    call = type(initializer).__call__
    return any(
        call is getattr(module, name).__call__
        for module in (
            init_ops_v2,
            *(keras.initializers for keras in keras_versions.loaded()),
        )
        for name in names
    )


def parameters(initializer: Any) -> set[str]:
    """Returns the names of an initializer's parameters."""
    try:
        return set(inspect.signature(initializer).parameters)
    except (TypeError, ValueError):
        return {"shape", "dtype"}


def _call(initializer: Any, shape: _Shape, **partition: Any) -> Any:
    # TF documents initializers without a dtype; its own take one.
    if len(parameters(initializer) - _PARTITION) > 1:
        return initializer(shape, tf.float32, **partition)
    return initializer(shape, **partition)


def checked(
    table: TableSpec, rows: Any, shape: Sequence[int | None], first: int = 0
) -> tf.Tensor:
    """Returns rows as a tensor; raises unless they are float32 of the shape."""
    rows = tf.convert_to_tensor(rows)
    if not rows.shape.is_compatible_with(shape) or rows.dtype != tf.float32:
        part = ""
        if shape[0] is not None and shape[0] < table.vocabulary_size:
            part = f", for its rows {first} to {first + shape[0] - 1}"
        raise ValueError(
            f"Table '{table.name}': its initializer returned "
            f"{rows.dtype.name} of shape {tuple(rows.shape)}, not float32 of "
            f"shape {shape}{part}."
        )
    return rows


def _rounded(table: TableSpec, rows: tf.Tensor, first: int) -> tf.Tensor:
    """Returns rows in the table's dtype; raises if one would be infinite."""
    rounded = tf.cast(rows, table.dtype)
    if rounded.dtype == rows.dtype or tf.is_symbolic_tensor(rows):
        return rounded
    lost = tf.math.is_finite(rows) & ~tf.math.is_finite(rounded)
    if tf.reduce_any(lost):
        row, column = tf.where(lost)[0].numpy()
        raise ValueError(
            f"Table '{table.name}': its initializer returned "
            f"{rows[row, column].numpy():g} for row {first + row}, beyond "
            f"{table.dtype}'s largest number, {rounded.dtype.max:g}."
        )
    return rounded
