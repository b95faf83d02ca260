"""Keys of any dtype as int64, which tables with `DynamicKeys` know them by."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.ops.checks import Checks, message
from tfrs_embed.ops.tensors import to_tensor


def as_int64(where: Any, dtype: tf.DType, ids: Any, checks: Checks) -> Any:
    """Checks keys, and brings them to int64.

    Args:
        where: whose they are, for errors.
        dtype: the table's dtype of keys.
        ids: the keys: a Tensor (or what converts to one), a RaggedTensor or a
            SparseTensor of that dtype, or of an integer dtype all of whose
            values that has.
        checks: takes the conditions that depend on values.

    Returns:
        The same with int64 keys: of a uint64 its bits, of a string its
        fingerprint.

    Raises:
        TypeError: keys of another dtype.
    """

    def convert(values: tf.Tensor) -> tf.Tensor:
        _check_dtype(where, values.dtype, dtype)
        if dtype == tf.string:
            return _fingerprints(where, values, checks)
        # Signed ones are widened with their sign first, as in the wider dtype.
        values = tf.cast(values, dtype)
        if dtype == tf.uint64:
            return tf.bitcast(values, tf.int64)
        return tf.cast(values, tf.int64)

    if isinstance(ids, tf.RaggedTensor):
        return ids.with_flat_values(convert(ids.flat_values))
    if isinstance(ids, tf.SparseTensor):
        converted = ids.with_values(convert(ids.values))
        converted.set_shape(ids.shape)
        return converted
    if not tf.is_tensor(ids):
        ids = _from_python(where, ids, dtype)
    return convert(ids)


def _from_python(where: Any, ids: Any, dtype: tf.DType) -> tf.Tensor:
    """Python's numbers as a tensor; they have no dtype to be wrong."""
    if not hasattr(ids, "dtype"):
        array = np.asarray(ids)
        if array.size == 0:
            return tf.zeros(array.shape, dtype)
        integers = array.dtype.kind in "iuO" and dtype.is_integer
        if integers and isinstance(array.flat[0], (int, np.integer)):
            low, high = min(array.flat), max(array.flat)
            if low < dtype.min or high > dtype.max:
                raise TypeError(
                    f"{where}: keys must be {dtype.name}, got "
                    f"{low if low < dtype.min else high}."
                )
            return tf.constant(array.astype(dtype.as_numpy_dtype))
    return to_tensor(ids, f"{where}: keys")


def _check_dtype(where: Any, given: tf.DType, wanted: tf.DType) -> None:
    """Requires a dtype all of whose values the keys' dtype has."""
    if given == wanted:
        return
    if not (
        given.is_integer
        and wanted.is_integer
        and wanted.min <= given.min
        and given.max <= wanted.max
    ):
        hint = (
            " Keys of another width would be other keys."
            if given.is_integer and wanted.is_integer
            else ""
        )
        raise TypeError(
            f"{where}: keys must be {wanted.name}, as its table's "
            f"DynamicKeys say, got {given.name}.{hint}"
        )


def _fingerprints(where: Any, keys: tf.Tensor, checks: Checks) -> tf.Tensor:
    """The keys' 64-bit fingerprints, of strings that aren't empty."""
    flat = tf.reshape(keys, [-1])
    empty = tf.equal(flat, "")

    def text() -> tf.Tensor:
        place = tf.reduce_sum(tf.where(empty)[:1])
        return message(
            f"{where}: key number ",
            place,
            " is an empty string, which is no key. Leave it out, or give it a "
            "name of its own.",
        )

    checks.require(tf.logical_not(tf.reduce_any(empty)), text)
    bytes_ = tf.fingerprint(flat)
    return tf.reshape(tf.bitcast(bytes_, tf.int64), tf.shape(keys))
