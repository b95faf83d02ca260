"""Turns keys of any dtype into the int64 keys of tables with `DynamicKeys`."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.arguments import as_int
from tfrs_embed.ops.checks import Checks, message
from tfrs_embed.ops.tensors import map_values, to_tensor


def as_int64(
    where: Any,
    dtype: tf.DType,
    ids: Any,
    checks: Checks,
    empty: bool = False,
) -> Any:
    """Checks keys and returns them as int64, in the same kind of tensor.

    Keys are of the table's `dtype`, or of an integer dtype with a smaller
    range. The int64 of a uint64 has its bits, that of a string is its
    fingerprint. `empty`: whether strings may be empty.
    """

    def convert(values: tf.Tensor) -> tf.Tensor:
        _check_dtype(where, values.dtype, dtype)
        if dtype == tf.string:
            return _fingerprints(where, values, checks, empty)
        # First to the keys' dtype, so that negative keys keep their sign.
        values = tf.cast(values, dtype)
        if dtype == tf.uint64:
            return tf.bitcast(values, tf.int64)
        return tf.cast(values, tf.int64)

    kinds = (tf.RaggedTensor, tf.SparseTensor)
    if not (tf.is_tensor(ids) or isinstance(ids, kinds)):
        ids = _from_python(where, ids, dtype)
    return map_values(convert, ids)


def _from_python(where: Any, ids: Any, dtype: tf.DType) -> tf.Tensor:
    """Converts Python's numbers to `dtype`; arrays keep their dtype."""
    if not hasattr(ids, "dtype"):
        # dtype object keeps integers of any size.
        array = np.array(ids, object)
        if array.size == 0:
            return tf.zeros(array.shape, dtype)
        integers = all(as_int(key) is not None for key in array.flat)
        if integers and dtype.is_integer:
            low, high = min(array.flat), max(array.flat)
            if low < dtype.min or high > dtype.max:
                raise TypeError(
                    f"{where}: keys must be {dtype.name}, got "
                    f"{low if low < dtype.min else high}."
                )
            return tf.constant(array.astype(dtype.as_numpy_dtype))
    return to_tensor(ids, f"{where}: keys")


def _check_dtype(where: Any, given: tf.DType, wanted: tf.DType) -> None:
    """Requires every value of the given dtype to exist in the wanted one."""
    integers = given.is_integer and wanted.is_integer
    if given == wanted or (
        integers and wanted.min <= given.min and given.max <= wanted.max
    ):
        return
    hint = " Keys of another width would be other keys." if integers else ""
    if given.is_integer and wanted == tf.string:
        hint = " tf.strings.as_string(ids), or ids.astype(str), makes strings."
    if given.is_floating:
        hint = (
            f" {given.name} doesn't hold every key. A Keras Input is of floats "
            f"unless it has a dtype: keras.Input(shape, dtype='{wanted.name}')."
        )
    raise TypeError(
        f"{where}: keys must be {wanted.name}, as its table's DynamicKeys say, "
        f"got {given.name}.{hint}"
    )


def _fingerprints(
    where: Any, keys: tf.Tensor, checks: Checks, may_be_empty: bool
) -> tf.Tensor:
    """Returns 64-bit fingerprints of strings."""
    flat = tf.reshape(keys, [-1])
    empty = tf.equal(flat, "")

    def text() -> tf.Tensor:
        place = tf.reduce_sum(tf.where(empty)[:1])
        return message(
            f"{where}: key number ",
            place,
            " is an empty string. Leave it out, or give it a name of its own.",
        )

    if not may_be_empty:
        checks.require(tf.logical_not(tf.reduce_any(empty)), text)
    return tf.reshape(fingerprints(flat), tf.shape(keys))


def fingerprints(strings: tf.Tensor) -> tf.Tensor:
    """Returns the int64 keys of strings, [n]: their fingerprints."""
    return tf.bitcast(tf.fingerprint(strings), tf.int64)
