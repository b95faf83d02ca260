"""Keras 3's private API: all of this library's uses, with reasons."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

try:
    # While Keras traces a model for its shapes it postpones variables. Tables
    # must exist when their layer is built. A table can't have the values that
    # `stateless_call` is given.
    from keras.src.backend.common import global_state

    # `build`: as Keras traces a model whose parts it builds.
    from keras.src.backend.common.symbolic_scope import SymbolicScope

    # Its optimizers expect unique rows in a gradient. Ids that are looked up
    # twice, or on two replicas, give equal rows.
    from keras.src.backend.tensorflow.optimizer import TFOptimizer

    # `fit` fails before its first step under several workers.
    from keras.src.backend.tensorflow.trainer import TensorFlowTrainer

    # Losses are means over a replica's samples, divided by the replicas.
    from keras.src.losses import loss as losses

    # What `fit` makes of its `class_weight`, before data is distributed.
    from keras.src.trainers.data_adapters import tf_dataset_adapter
except ImportError as error:  # pragma: no cover
    raise ImportError(
        "This Keras 3 has not the private API that tfrs_embed.keras3 uses: "
        f"{error}. Use one that tfrs_embed was tried with."
    ) from error

_SCOPE = "stateless_scope"
# Keras notes there that it traces for shapes, with placeholders.
_TRACING = "symbolic_scope"
_TABLE = "_tfrs_embed_is_table"
# Of a thread: whether it runs `own_loop`, and the share of `weighted`.
_local = threading.local()


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


def gives_value(weight: Any) -> bool:
    """Whether Keras's `stateless_call` has another value for a weight."""
    scope = global_state.get_global_attribute(_SCOPE)
    return scope is not None and scope.get_current_value(weight) is not None


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


@contextlib.contextmanager
def own_loop() -> Iterator[None]:
    """Runs Keras's `fit` and `evaluate` with functions that are set before."""
    guard_loops()
    # A callback of `fit` may evaluate.
    before = getattr(_local, "own", False)
    _local.own = True
    try:
        yield
    finally:
        _local.own = before


@functools.cache
def guard_loops() -> None:
    """Lets Keras's loops raise a clear error where Keras 3 can't train.

    Before its first step Keras 3.12 to 3.15 reduces a batch to one that it
    builds the model from. MultiWorkerMirroredStrategy reduces no dicts, and the
    mean of a scalar metric, which each step takes, needs an axis there
    (keras-team/keras#20585).
    """
    build = TensorFlowTrainer._maybe_symbolic_build

    @functools.wraps(build)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(_local, "own", False):
            return
        if _has_workers(self):
            raise NotImplementedError(
                f"Model '{self.name}': Keras 3 doesn't train under "
                "MultiWorkerMirroredStrategy. Call tfrs_embed.keras3.fit(model,"
                " data, strategy) or tfrs_embed.keras3.evaluate instead."
            )
        build(self, *args, **kwargs)

    TensorFlowTrainer._maybe_symbolic_build = checked
    make = TensorFlowTrainer.make_predict_function

    @functools.wraps(make)
    def of_one_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        # Otherwise one worker raises, and the others wait for it.
        if _has_workers(self) and self.steps_per_execution > 1:
            raise NotImplementedError(
                f"Model '{self.name}': on several workers Keras 3 predicts "
                "with steps_per_execution=1 only, and this model has "
                f"{self.steps_per_execution}. Set model.steps_per_execution."
            )
        return make(self, *args, **kwargs)

    TensorFlowTrainer.make_predict_function = of_one_step


def _has_workers(model: Any) -> bool:
    workers = tf.distribute.MultiWorkerMirroredStrategy
    return isinstance(model.distribute_strategy, workers)


def build(
    model: Any,
    spec: Any,
    strategy: tf.distribute.Strategy,
    decode: Callable[[Any], Any],
) -> None:
    """Builds a model's layers, losses, metrics and optimizer, if they aren't.

    Unlike Keras's own way, batches may have ragged and sparse ids. `decode`
    makes a batch of what has the type `spec`.
    """

    @tf.function(autograph=False)
    def trace(batch: Any) -> None:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(decode(batch))
        outputs = model(x, training=False)
        if model._compile_loss is not None:
            model._compute_loss(x, y, outputs, weight, training=False)
        if model._compile_metrics is not None:
            model.compute_metrics(x, y, outputs, weight)

    parts = [*model._flatten_layers()]
    parts += filter(None, (model._compile_loss, model._compile_metrics))
    with strategy.scope():
        if not all(part.built for part in parts):
            with keras.StatelessScope(), SymbolicScope():
                trace.get_concrete_function(spec)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        model._post_build()


@contextlib.contextmanager
def weighted(share: tf.Tensor) -> Iterator[None]:
    """Weights a replica's mean losses with its share of the batch's samples.

    Keras divides them by the number of replicas, which is wrong for a batch
    that replicas can't share evenly; and it divides no loss that a function
    returns as a scalar, which would count once for each replica. `share` is a
    float32 scalar from 0 to 1.
    """
    _weigh_losses()
    _local.share = share
    try:
        yield
    finally:
        _local.share = None


def _local_share() -> Any:
    return getattr(_local, "share", None)


@functools.cache
def _weigh_losses() -> None:
    def by_share(original: Any, operation: Any) -> Any:
        @functools.wraps(original)
        def scaled(value: Any) -> Any:
            share = _local_share()
            if share is None:
                return original(value)
            return operation(value, tf.cast(share, value.dtype))

        return scaled

    losses.scale_loss_for_distribution = by_share(
        losses.scale_loss_for_distribution, tf.math.multiply_no_nan
    )
    losses.unscale_loss_for_distribution = by_share(
        losses.unscale_loss_for_distribution, tf.math.divide_no_nan
    )
    reduce = losses.reduce_values

    @functools.wraps(reduce)
    def scaling_scalars(
        values: Any,
        sample_weight: Any = None,
        reduction: str | None = "sum_over_batch_size",
    ) -> Any:
        loss = reduce(values, sample_weight, reduction)
        scales = reduction not in (None, "none", "sum")
        if not scales or values.shape.rank or _local_share() is None:
            return loss
        return losses.scale_loss_for_distribution(loss)

    losses.reduce_values = scaling_scalars


def with_class_weights(
    data: tf.data.Dataset, weights: dict[int, float]
) -> tf.data.Dataset:
    """Returns a dataset with sample weights, by a class's number."""
    return data.map(tf_dataset_adapter.make_class_weight_map_fn(weights))
