"""The computations of SparseCores on their buffers, in TensorFlow's plain ops.

A chip's buffers of a stack, as ConvertToSparseCoreCsrWrappedCooTensor makes
them, have a run of (sample, row, gain) for each of its SparseCores and each
shard. Runs start at multiples of 8. Row pointers have the runs' ends, and are
padded to a multiple of 8 for each SparseCore.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from tfrs_embed.sparsecore.buffers import padded_sizes
from tfrs_embed.sparsecore.topology import Topology


class Entries(NamedTuple):
    """The entries of buffers: each adds gain * row to a sample.

    Attributes:
        sample: [n] int32, among the samples of the buffers' chips.
        row: [n] int32, shard * rows_per_shard + the row of the shard.
        gain: [n] float32.
    """

    sample: tf.Tensor
    row: tf.Tensor
    gain: tf.Tensor


def decode(
    buffers: Sequence[tf.Tensor],
    topology: Topology,
    samples: int,
    rows_per_shard: int,
    chips: int = 1,
) -> Entries:
    """Reads the entries of a stack's buffers, without padding, in order.

    Args:
        buffers: row pointers; sample ids of the run's SparseCore; token ids,
            rows of the run's shard; all int32; gains, float32.
        topology: the slice.
        samples: the stack's samples per chip.
        rows_per_shard: the stack's rows per shard.
        chips: the number of chips whose buffers follow each other.
    """
    row_pointers, sample_ids, token_ids, gains = buffers
    cores, shards = topology.sparse_cores, topology.shards
    pointers = padded_sizes(shards)
    ends = tf.reshape(row_pointers, [chips, -1])[:, : cores * pointers]
    ends = tf.reshape(ends, [chips, cores, pointers])[:, :, :shards]
    ends = tf.reshape(ends, [chips, cores * shards])
    starts = tf.pad(padded_sizes(ends[:, :-1]), [[0, 0], [1, 0]])
    size = sample_ids.shape[0] // chips
    of_chip = tf.range(0, chips * size, size)[:, tf.newaxis]
    starts = tf.reshape(starts + of_chip, [-1])
    ends = tf.reshape(ends + of_chip, [-1])
    index = tf.ragged.range(starts, ends).flat_values
    # If several runs start at one place, all but the last are empty.
    run = tf.searchsorted(starts, index, side="right") - 1
    per_core = samples // cores
    return Entries(
        sample=tf.gather(sample_ids, index) + run // shards * per_core,
        row=tf.gather(token_ids, index) + run % shards * rows_per_shard,
        gain=tf.gather(gains, index),
    )


def quantize(
    rows: tf.Tensor, low: float, high: float, buckets: int
) -> tf.Tensor:
    """Rounds rows to the nearest of some equally distant values."""
    quantum = (high - low) / (buckets - 1)
    rows = tf.clip_by_value(rows, low, high)
    return tf.floor((rows - low) / quantum + 0.5) * quantum + low


def activations(entries: Entries, rows: tf.Tensor, samples: int) -> tf.Tensor:
    """Combines the entries' rows, [n, dim], into samples, [samples, dim].

    Both are float32. A sample without entries is zero.
    """
    rows *= entries.gain[:, tf.newaxis]
    return tf.math.unsorted_segment_sum(rows, entries.sample, samples)


def row_gradients(
    entries: Entries, gradients: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
    """Sums the gradients of activations, [samples, dim], by row.

    Returns the unique rows, [m] int32, in the order of their first entries, and
    their gradients, [m, dim] float32.
    """
    rows, index = tf.unique(entries.row)
    parts = tf.gather(gradients, entries.sample) * entries.gain[:, tf.newaxis]
    return rows, tf.math.unsorted_segment_sum(parts, index, tf.size(rows))
