"""Gradients of activations to new rows."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.ops import lookup
from tfrs_embed.ops.bags import Bags


def row_gradients(
    gradients: Sequence[tf.Tensor], bags: Sequence[Bags]
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums a table's gradients row by row, over all its features.

    Args:
        gradients: each feature's [count, dim] float32.
        bags: each feature's bags.

    Returns:
        The unique ids, [rows], in the order they first occur, and their summed
        gradients, [rows, dim] float32.
    """
    ids = [b.ids for b in bags]
    unique, index = tf.unique(ids[0] if len(ids) == 1 else tf.concat(ids, 0))
    rows = lookup.spread(gradients, bags, index, tf.size(unique))
    return unique, rows


def scatter_update(
    variable: tf.Variable, ids: tf.Tensor, rows: tf.Tensor
) -> None:
    """Writes rows in place.

    ResourceScatterUpdate with unique ids was the fastest of TensorFlow's
    scatter ops on a CPU, and it does not read or copy the variable.

    Args:
        variable: [vocabulary_size, dim].
        ids: [rows], unique.
        rows: [rows, dim].
    """
    tf.raw_ops.ResourceScatterUpdate(
        resource=variable.handle, indices=ids, updates=rows
    )
