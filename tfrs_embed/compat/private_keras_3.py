"""Keras 3's private API: all of this library's uses, with reasons."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

try:
    # While Keras traces a model for its shapes it postpones variables. Tables
    # must exist when their layer is built.
    from keras.src.backend.common import global_state

    # Its optimizers expect unique rows in a gradient. Ids that are looked up
    # twice, or on two replicas, give equal rows.
    from keras.src.backend.tensorflow.optimizer import TFOptimizer
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "This Keras 3 has not the private API that tfrs_embed.keras3 uses: "
        f"{error}. Use one that tfrs_embed was tried with."
    ) from error

_SCOPE = "stateless_scope"
# Keras notes there that it traces for shapes, with placeholders.
_TRACING = "symbolic_scope"
_TABLE = "_tfrs_embed_is_table"


@contextlib.contextmanager
def creating_variables() -> Iterator[None]:
    """Makes variables at once even if Keras is tracing shapes."""
    scope = global_state.get_global_attribute(_SCOPE)
    global_state.set_global_attribute(_SCOPE, None)
    try:
        yield
    finally:
        global_state.set_global_attribute(_SCOPE, scope)


def traces_shapes() -> bool:
    """Whether Keras is calling a model with placeholders, for its shapes."""
    return global_state.get_global_attribute(_TRACING) is not None


def mark_table(weight: Any) -> None:
    """Makes Keras's optimizers sum a table's gradients by row."""
    _add_rows_up()
    for variable in (weight, weight.value):
        setattr(variable, _TABLE, True)


@functools.cache
def _add_rows_up() -> None:
    apply = TFOptimizer.apply
    reduce = TFOptimizer._all_reduce_sum_gradients

    @functools.wraps(apply)
    def apply_unique(
        self: Any, grads: Any, trainable_variables: Any = None
    ) -> Any:
        # Before clipping by norm.
        if trainable_variables is None:
            variables = getattr(self, "_trainable_variables", None) or []
        else:
            trainable_variables = variables = list(trainable_variables)
        if len(grads) == len(variables):  # Keras raises else.
            grads = [
                _unique(gradient, variable)
                for gradient, variable in zip(grads, variables, strict=True)
            ]
            if self.loss_scale_factor is not None:
                # Keras can't divide an IndexedSlices by the factor.
                grads = [
                    tf.convert_to_tensor(each)
                    if isinstance(each, tf.IndexedSlices)
                    else each
                    for each in grads
                ]
        return apply(self, grads, trainable_variables)

    @functools.wraps(reduce)
    def reduce_and_add(self: Any, grads_and_vars: Any) -> Any:
        strategy = tf.distribute.get_strategy()
        if strategy.num_replicas_in_sync == 1:
            return reduce(self, grads_and_vars)
        return [
            (_unique(gradient, variable), variable)
            for gradient, variable in reduce(self, grads_and_vars)
        ]

    TFOptimizer.apply = apply_unique
    TFOptimizer._all_reduce_sum_gradients = reduce_and_add


def _unique(gradient: Any, variable: Any) -> Any:
    """Returns a table's gradient with unique rows; others as they are."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    if not getattr(variable, _TABLE, False):
        return gradient
    rows, index = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(
        gradient.values, index, tf.shape(rows)[0]
    )
    return tf.IndexedSlices(values, rows, gradient.dense_shape)
