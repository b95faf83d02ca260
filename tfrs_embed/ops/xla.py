"""Lookups and updates inside `tf.function(jit_compile=True)`, on one device.

XLA compiles for fixed shapes, and a compiled program can't raise errors. So
lookups and updates differ there:

- An id outside its table becomes the largest number of its dtype. The row read
  for it is never used, and nothing is written for it.
- With invalid_ids="zero" such an id counts as absent, as elsewhere.
- With invalid_ids="error" each vector with such an id is NaN; the call's other
  vectors are right. The call's update is left out: no row, slot or step counter
  changes.
- Ids and weights, or an output_shape, that don't fit together raise errors
  while tracing if their shapes are known then, else the whole call is NaN.
- An update of n ids writes n rows, as XLA needs a fixed number: each row once,
  then the first of them again, with the same values. So it is also right where
  a function traced inside XLA is called from outside.

On TPUs the host checks ids, and none of this is used.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.ops.bags import (
    BaggedIds,
    all_valid,
    id_dtype,
    of_one_dtype,
)
from tfrs_embed.ops.checks import Checks
from tfrs_embed.ops.gradient_sums import per_id
from tfrs_embed.ops.id_range import valid
from tfrs_embed.ops.parsed_ids import ParsedIds
from tfrs_embed.ops.stock import Stock
from tfrs_embed.ops.update import (
    GradientContributions,
    TableUpdate,
    update_unique,
)


def mark(parsed: Sequence[ParsedIds], checks: Checks, required: bool) -> None:
    """Flattens ids to [n], and replaces those outside of their tables.

    They make the call invalid if valid ids are `required`. Conditions of
    `checks` that don't hold do too, and replace all ids.
    """
    inside = []
    for each in parsed:
        each.flatten()
        size = each.feature.table.vocabulary_size
        inside.append(each.ids >= 0 if each.are_rows else valid(each.ids, size))
    shapes_fit = checks.hold()
    fits = [
        tf.reduce_all(mask)
        for each, mask in zip(parsed, inside, strict=True)
        if required and each.is_number
    ]
    all_fit = tf.reduce_all([shapes_fit, *fits])
    for each, mask in zip(parsed, inside, strict=True):
        ids = tf.cast(each.ids, id_dtype(each.feature.table))
        each.ids = tf.where(mask & shapes_fit, ids, ids.dtype.max)
        each.all_valid = all_fit


class Xla(Stock):
    """The operations that XLA compiles."""

    def hash_ids(self, *args: object) -> list[tf.Tensor]:
        raise NotImplementedError(
            "Hashed features are not supported inside tf.function("
            "jit_compile=True): TensorFlow hashes strings, which XLA doesn't "
            "have. Leave jit_compile out, or call this layer outside of it."
        )

    @staticmethod
    def sum_gradients_by_row(
        gradients: Sequence[tf.Tensor],
        bags: Sequence[BaggedIds],
        index: tf.Tensor,
        num_rows: tf.Tensor,
        dtype: tf.DType | None = None,
    ) -> tf.Tensor:
        # XLA has no sparse products. A call with an invalid id trains no row.
        each = per_id(gradients, bags)
        each = tf.where(all_valid(bags), each, tf.zeros_like(each))
        total = tf.math.unsorted_segment_sum(each, index, num_rows)
        return tf.cast(total, dtype or gradients[0].dtype)

    def row_gradients(
        self, contributions: GradientContributions
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Sums a table's gradients by row, over all its features.

        Returns:
            [n] ids: the unique ones, ascending, then the dtype's largest
            number; none are unique if the call's ids aren't all valid. Their
            summed gradients, [n, dim] float32, and zeros.
        """
        bags, gradients, *_ = contributions
        ids = tf.concat(of_one_dtype([b.ids for b in bags]), 0)
        ids = tf.where(all_valid(bags), ids, ids.dtype.max)
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
        return ids, tf.where(_used(ids)[:, None], sums, 0.0)

    def update(self, updates: Sequence[TableUpdate]) -> None:
        for each in updates:
            ids, sums = self.row_gradients(each.contributions)
            used = _used(ids)
            source = tf.where(used, tf.range(tf.size(ids)), 0)
            last = each.parameters.shape[0] - 1
            ids = tf.minimum(tf.gather(ids, source), last)
            made = tf.reduce_any(used)
            update_unique(each, ids, tf.gather(sums, source), made)


def _used(ids: tf.Tensor) -> tf.Tensor:
    return ids < ids.dtype.max
