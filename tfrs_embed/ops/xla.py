"""Lookups and updates inside `tf.function(jit_compile=True)`.

XLA compiles for fixed shapes, and a compiled program can't raise errors. So
lookups and updates differ, on one device and with dense ids:

- An id outside its table becomes one just beyond it. What is read for it is
  never used. Nothing is written for it.
- With invalid_ids="zero" such an id counts as absent, as elsewhere.
- With invalid_ids="error" it gives NaN instead of an error, in each vector that
  it is part of; all other vectors of the call are what they should be. The
  call's update is left out: no row, slot or step counter changes. What the
  model's own optimizer trains gets a loss of NaN, as from any NaN.
- Ids and weights, or an output_shape, that don't fit together are errors while
  tracing if their shapes are known then, else they make all of the call NaN.
- An update of n ids writes n rows, as XLA has to know their number: each row
  once, then the first of them again, with the same values. Nothing depends on
  what XLA does with a row that isn't there, so that it is right as well where
  a function that was traced inside XLA is called from outside.

On TPUs, whose programs XLA compiles as well, ids are checked on the host, and
none of this is used.
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
    """Rows, [n, dim], with zeros or NaN for ids that aren't there."""
    assert bags.validity is not None
    mask, all_valid = bags.validity.mask[:, None], bags.validity.all_valid
    nothing = tf.where(all_valid, 0.0, float("nan"))
    # Where the model's optimizer trains the rows, a call with a bad id gives
    # them no gradient: it would be NaN.
    fixed = tf.where(mask, tf.stop_gradient(rows), tf.cast(nothing, rows.dtype))
    return tf.where(mask & all_valid, rows, fixed)


def row_gradients(
    bags: Sequence[BaggedIds], gradients: Sequence[tf.Tensor], num_rows: int
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Sums a table's gradients row by row, over all its features.

    Args:
        bags: bags of n ids in all, of each feature.
        gradients: their vectors' gradients, [count, dim] float32.
        num_rows: the number of the table's rows.

    Returns:
        [n] ids, all in the table: the unique ones, then the first of them as
        often as it takes to make them n. The rows' summed gradients, [n, dim]
        float32, the same for the same id. And whether there is anything to
        update, a scalar bool; if not, ids and sums mean nothing.
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
    # A position that no id is in has the largest number that there is.
    ids = tf.math.unsorted_segment_min(ids, run, size)
    used = ids < num_rows
    source = tf.where(used, tf.range(size), 0)
    ids = tf.minimum(tf.gather(ids, source), num_rows - 1)
    made = validity.all_valid & tf.reduce_any(used)
    return ids, tf.gather(sums, source), made


def updates(bags: Iterable[BaggedIds]) -> tf.Tensor | int:
    """The number of updates that a step makes: 1, or 0 if an id is not valid.

    Args:
        bags: the step's bags, compiled or not.

    Returns:
        A number, or a scalar int64.
    """
    validity = next((b.validity for b in bags), None)
    return 1 if validity is None else tf.cast(validity.all_valid, tf.int64)
