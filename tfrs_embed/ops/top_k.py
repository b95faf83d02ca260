"""The best of many rows by their scores, in blocks of rows.

All scores of a table at once would be batch * rows numbers. Of a block's scores
few exceed the worst of the best found so far. The maxima of short runs of
scores show where those are, for a fraction of a `top_k`'s time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf

#: The score of no row.
NONE = float("-inf")
# The most numbers of a block's scores, and of its rows: the C library keeps
# memory of 16 MiB for the next block, and returns more to the system.
_BLOCK_ELEMENTS = 1 << 22
# The scores in a run, and the fewest runs of a block.
_RUN, _LEAST_RUNS = 16, 64


def best_rows(
    scores_of: Callable[[tf.Tensor, tf.Tensor], tf.Tensor],
    count: Any,
    batch: tf.Tensor,
    width: int,
    k: Any,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Finds the rows with the k best scores for each of `batch` queries.

    Args:
        scores_of: returns scores, [batch, size] float32, of the rows from
            `start` on: f(start, size), scalars int64.
        count: the number of rows, a scalar.
        batch: the number of queries, a scalar int32.
        width: the numbers of a row.
        k: how many rows to find, a scalar.

    Returns:
        Scores, [batch, k] float32, descending, and rows, [batch, k] int64;
        equal scores are in the order of rows. `NONE`, and any row, where there
        are fewer rows.
    """
    count = tf.cast(count, tf.int64)
    runs = _BLOCK_ELEMENTS // (tf.maximum(batch, width) * _RUN)
    runs = tf.maximum(runs, _LEAST_RUNS)
    size = tf.cast(runs * _RUN, tf.int64)

    def add_block(
        start: tf.Tensor, best: tf.Tensor, rows: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        scores = tf.reshape(scores_of(start, size), [batch, runs, _RUN])
        highest = tf.reduce_max(scores, 2)
        # Equal scores of earlier rows come first.
        better = tf.cast(highest > best[:, -1:], tf.int32)
        most = tf.maximum(tf.reduce_max(tf.reduce_sum(better, 1)), 1)
        found = tf.math.top_k(highest, tf.minimum(most, k), sorted=False)
        places = tf.sort(found.indices, 1)
        new = tf.gather(scores, places, batch_dims=1)
        first = start + tf.cast(places, tf.int64) * _RUN
        numbers = first[:, :, None] + tf.range(_RUN, dtype=tf.int64)
        shape = [batch, tf.shape(places)[1] * _RUN]
        best, rows = _add(
            best, rows, tf.reshape(new, shape), tf.reshape(numbers, shape), k
        )
        return start + size, best, rows

    any_shape = tf.TensorShape([None, None])
    start, best, rows = tf.while_loop(
        lambda start, *_: start + size <= count,
        add_block,
        (
            tf.constant(0, tf.int64),
            tf.fill([batch, k], NONE),
            tf.zeros([batch, k], tf.int64),
        ),
        shape_invariants=(tf.TensorShape([]), any_shape, any_shape),
        parallel_iterations=1,  # More would need the memory of more blocks.
    )
    last = scores_of(start, count - start)
    numbers = tf.broadcast_to(tf.range(start, count), tf.shape(last))
    return _add(best, rows, last, numbers, k)


def merge(
    scores: tf.Tensor, ids: tf.Tensor, k: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the k best of [batch, n] scores and ids; of equals lower ids."""
    order = tf.argsort(ids, 1)
    scores = tf.gather(scores, order, batch_dims=1)
    return _best(scores, tf.gather(ids, order, batch_dims=1), k)


def leave_out(
    scores: tf.Tensor, ids: tf.Tensor, excluded: tf.Tensor, k: int
) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the k best of [batch, n] scores and ids without excluded ids.

    `excluded` are [batch, m] int64. Where fewer are left: `NONE` and any id.
    """
    number = tf.shape(excluded)[1]
    # An entry beyond the others, so that all places are there.
    excluded = tf.pad(
        tf.sort(excluded, 1), [[0, 0], [0, 1]], constant_values=tf.int64.max
    )
    place = tf.searchsorted(excluded, ids)
    out = tf.equal(tf.gather(excluded, place, batch_dims=1), ids)
    scores = tf.where(out & (place < number), NONE, scores)
    return _best(scores, ids, k)


def _add(
    best: tf.Tensor, rows: tf.Tensor, scores: tf.Tensor, new: tf.Tensor, k: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    """Adds scores of later rows to the best, [batch, k]."""
    return _best(tf.concat([best, scores], 1), tf.concat([rows, new], 1), k)


def _best(
    scores: tf.Tensor, ids: tf.Tensor, k: Any
) -> tuple[tf.Tensor, tf.Tensor]:
    found = tf.math.top_k(scores, k)
    return found.values, tf.gather(ids, found.indices, batch_dims=1)
