"""Errors that name the table for which memory lacked."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfrs_embed.compat.text_table import format_bytes


@contextlib.contextmanager
def naming(
    owner: str,
    shape: Sequence[int],
    dtype: tf.DType,
    slots: int,
    device: str | None,
) -> Iterator[None]:
    """Names a table if the code inside fails to allocate its memory.

    `shape` is [rows, dim], and `slots` how many float32 numbers of slots a row
    has. With device None, TensorFlow chooses.
    """
    try:
        yield
    except (tf.errors.ResourceExhaustedError, MemoryError) as error:
        rows, dim = shape
        dtype = tf.as_dtype(dtype)
        with tf.init_scope(), tf.device(device):
            place = tf.zeros([]).device
        beside = (
            f", and {format_bytes(4 * rows * slots)} for the optimizer's slots"
            if slots
            else ""
        )
        raise tf.errors.ResourceExhaustedError(
            None,
            None,
            f"{owner} can't be built: {place} lacks memory. {rows:,} rows of "
            f"{dim} {dtype.name} take {format_bytes(rows * dim * dtype.size)}"
            f"{beside}. A table takes less in bfloat16, with RowWiseAdagrad, "
            "with rows sharded over more replicas, or with ids hashed to fewer "
            "rows: see docs/memory.md.",
        ) from error
