"""Lookups and updates inside `tf.function(jit_compile=True)`.

XLA compiles for fixed shapes, and a compiled program can't raise errors. So
lookups and updates differ there, on one device and with dense ids:

- An id outside its table becomes vocabulary_size. The row read for it is never
  used, and nothing is written for it.
- With invalid_ids="zero" such an id counts as absent, as elsewhere.
- With invalid_ids="error" each vector with such an id is NaN; the call's other
  vectors are right. The call's update is left out: no row, slot or step counter
  changes. The model's own optimizer gets a loss of NaN.
- Ids and weights, or an output_shape, that don't fit together raise errors
  while tracing if their shapes are known then, else the whole call is NaN.
- An update of n ids writes n rows, as XLA needs a fixed number: each row once,
  then the first of them again, with the same values. So it is also right where
  a function traced inside XLA is called from outside.

On TPUs the host checks ids, and none of this is used.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import tensorflow as tf

from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.gradient_sums import per_id


def compiles(bags: Iterable[BaggedIds]) -> bool:
    """Whether any bags are of a lookup that XLA compiles."""
    return any(b.validity is not None for b in bags)


def valid_rows(rows: tf.Tensor, bags: BaggedIds) -> tf.Tensor:
    """Returns rows, [n, dim], with zeros or NaN for invalid ids."""
    assert bags.validity is not None
    mask, all_valid = bags.validity.mask[:, None], bags.validity.all_valid
    nothing = tf.where(all_valid, 0.0, float("nan"))
    # If the model's optimizer trains the rows, a call with an invalid id gives
    # them no gradient, which would be NaN.
    fixed = tf.where(mask, tf.stop_gradient(rows), tf.cast(nothing, rows.dtype))
    return tf.where(mask & all_valid, rows, fixed)


def row_gradients(
    bags: Sequence[BaggedIds], gradients: Sequence[tf.Tensor], num_rows: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Sums a table's gradients by row, over all its features.

    Returns:
        [n] ids in the table: the unique ones, then repetitions of the first.
        Their summed gradients, [n, dim] float32. A scalar bool: whether to
        update; if false, ids and sums mean nothing.
    """
    validity = bags[0].validity
    assert validity is not None
    ids = tf.concat([b.ids for b in bags], 0)
    order = tf.argsort(ids)
    ids = tf.gather(ids, order)
    # The first of equal ids starts a run.
    before = tf.concat([ids[:1] - 1, ids[:-1]], 0)
    run = tf.cumsum(tf.cast(ids != before, tf.int32)) - 1
    size = tf.size(ids)
    sums = tf.math.unsorted_segment_sum(
        tf.gather(per_id(gradients, bags), order), run, size
    )
    # An empty segment has the dtype's largest number.
    ids = tf.math.unsorted_segment_min(ids, run, size)
    used = ids < num_rows
    source = tf.where(used, tf.range(size), 0)
    ids = tf.minimum(tf.gather(ids, source), num_rows - 1)
    made = validity.all_valid & tf.reduce_any(used)
    return ids, tf.gather(sums, source), made


def updates(bags: Iterable[BaggedIds]) -> tf.Tensor | int:
    """Returns a step's number of updates: 1, or 0 if an id is invalid."""
    validity = next((b.validity for b in bags), None)
    return 1 if validity is None else tf.cast(validity.all_valid, tf.int64)
