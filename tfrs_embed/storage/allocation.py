"""Errors that name the table for which there is no memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence

import tensorflow as tf

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.storage.row_store import StoredTable


def of_table(
    table: StoredTable, device: str | None
) -> contextlib.AbstractContextManager[None]:
    """Names a table that is made on a device; see `naming`."""
    spec = table.spec
    return naming(
        f"Table '{spec.name}'",
        (table.rows, spec.dim),
        spec.dtype,
        sum(math.prod(slot.row(spec.dim)) for slot in table.slots.values()),
        device,
    )


@contextlib.contextmanager
def naming(
    owner: str,
    shape: Sequence[int],
    dtype: tf.DType,
    slots: int,
    device: str | None,
) -> Iterator[None]:
    """Names the table in the error of an allocation that fails inside.

    Args:
        owner: the table, or the layer, as errors call it.
        shape: [rows, dim], of the variable that is made here.
        dtype: its dtype.
        slots: the number of float32 numbers in a row's slots.
        device: where it is made; None: where TensorFlow places it.

    Yields:
        Nothing.

    Raises:
        tf.errors.ResourceExhaustedError: there is no memory for it.
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
