"""Gradients of small tables, whose rows Keras 3's optimizers take for unique.

Ids that are looked up twice, or on two replicas, give equal rows in a gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import private_keras_3

_ATTRIBUTE = "_tfrs_embed_repeats_rows"


def mark(table: Any) -> None:
    """Makes optimizers that train a Keras 3 variable sum its rows."""
    for variable in (table, table.value):
        setattr(variable, _ATTRIBUTE, True)


def sum_for(optimizer: Any, variables: Sequence[Any]) -> None:
    """Makes an optimizer of Keras 3 sum rows, if it trains a marked variable.

    It is to be called when the optimizer is built.
    """
    if any(hasattr(variable, _ATTRIBUTE) for variable in variables):
        private_keras_3.replace_methods(optimizer, _Summing)


class _Summing:
    """Methods of an optimizer that trains small tables."""

    # Keras calls it before the scale of losses, and before clipping by norm.
    def _filter_empty_gradients(self: Any, grads: Any, vars: Any) -> Any:
        found = type(self)._filter_empty_gradients(self, grads, vars)
        summed = [_unique(*each) for each in zip(*found, strict=True)]
        if self.loss_scale_factor is not None:
            # Keras can't divide an IndexedSlices by the factor.
            summed = [
                tf.convert_to_tensor(each)
                if isinstance(each, tf.IndexedSlices)
                else each
                for each in summed
            ]
        return summed, found[1]

    def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
        reduced = type(self)._all_reduce_sum_gradients(self, grads_and_vars)
        if tf.distribute.get_strategy().num_replicas_in_sync == 1:
            return reduced
        return [(_unique(*pair), pair[1]) for pair in reduced]


def _unique(gradient: Any, variable: Any) -> Any:
    """Returns a table's gradient with unique rows; others as they are."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if not hasattr(variable, _ATTRIBUTE):
        return gradient
    rows, index = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(
        gradient.values, index, tf.shape(rows)[0]
    )
    return tf.IndexedSlices(values, rows, gradient.dense_shape)
