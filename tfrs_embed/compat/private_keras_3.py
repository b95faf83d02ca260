"""Keras 3's private API: all of this library's uses, with reasons."""

from __future__ import annotations

import contextlib
import threading
import types
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
# Keras notes there which layer a program has called, itself or by others.
_CALLED = "current_call_ctx"
# Of a thread: the share of `weighted`.
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


def replace_methods(owner: Any, methods: type) -> None:
    """Gives one object a class's methods in place of its own; idempotent.

    The others of its class keep theirs. A method calls what it replaces by its
    object's type. A deep copy has methods of its own; a shallow copy shares
    those of the object.
    """
    for name, method in vars(methods).items():
        if isinstance(method, types.FunctionType):
            getattr(owner, name)  # This Keras must have it.
            vars(owner)[name] = types.MethodType(method, owner)


@contextlib.contextmanager
def own_loop(model: Any) -> Iterator[None]:
    """Runs Keras's `fit` and `evaluate` with functions that are set before."""
    replace_methods(model, _OwnLoop)
    # A callback of `fit` may evaluate.
    before = _is_own(model)
    vars(model)[_OWN] = True
    try:
        yield
    finally:
        vars(model)[_OWN] = before


_OWN = "_tfrs_embed_own_loop"


def _is_own(model: Any) -> bool:
    return bool(vars(model).get(_OWN, False))


class _OwnLoop:
    """Methods of a model that `own_loop` runs."""

    def _maybe_symbolic_build(self, *args: Any, **kwargs: Any) -> None:
        # Under several workers it fails: they reduce no dicts.
        if not _is_own(self):
            type(self)._maybe_symbolic_build(self, *args, **kwargs)

    def _aggregate_additional_loss(self, loss: Any) -> Any:
        scaled = type(self)._aggregate_additional_loss(self, loss)
        return _weigh(scaled, _factor())


class Reducing:
    """The method of a strategy of several workers that Keras's loops call."""

    def reduce(self: Any, reduce_op: Any, value: Any, axis: Any) -> Any:
        try:
            return type(self).reduce(self, reduce_op, value, axis)
        except (TypeError, ValueError) as error:
            # Keras reduces a batch so, to build a model of it.
            if reduce_op == "MEAN" and isinstance(value, tuple):
                raise NotImplementedError(f"A model: {_UNTRAINED}") from error
            raise


_UNTRAINED = (
    "Keras 3 doesn't train under MultiWorkerMirroredStrategy. Call "
    "tfrs_embed.keras3.fit(model, data, strategy) or "
    "tfrs_embed.keras3.evaluate instead."
)


def refuse_loops() -> None:
    """Raises an error in a loop of Keras's own that fails on several workers.

    Before its first step Keras 3.12 to 3.15 reduces a batch, which fails for
    dicts (see `Reducing`), and calls a model with placeholders. Then the mean
    of a scalar metric, which each step takes, needs an axis under
    MultiWorkerMirroredStrategy (keras-team/keras#20585). A layer that a model
    calls may call this.

    Raises:
        NotImplementedError: `fit`, `evaluate`, or `predict` with
            `steps_per_execution`, by which one worker raises, and the others
            wait for it.
    """
    called = global_state.get_global_attribute(_CALLED)
    model = getattr(called, "entry_layer", None)
    if not isinstance(model, keras.Model) or _is_own(model):
        return
    if traces_shapes():
        if model.compiled:
            raise NotImplementedError(f"Model '{model.name}': {_UNTRAINED}")
    elif model.steps_per_execution > 1 and not tf.executing_eagerly():
        raise NotImplementedError(
            f"Model '{model.name}': on several workers Keras 3 predicts "
            "with steps_per_execution=1 only, and this model has "
            f"{model.steps_per_execution}. Set model.steps_per_execution."
        )


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
    """Weights the losses of `weigh_losses` with a replica's share of a batch.

    `share` is a float32 scalar from 0 to 1.
    """
    _local.share = share
    try:
        yield
    finally:
        _local.share = None


def weigh_losses(model: Any) -> None:
    """Makes a built model's losses those of all replicas' samples.

    Keras divides means over a replica's samples by the number of replicas,
    which is wrong for a batch that they can't share evenly; and it divides no
    loss that a function returns as a scalar, which would count once for each
    replica. These are the losses that the model is compiled with, and those
    that are attributes of it and its layers; outside of `weighted` they are as
    before.
    """
    compiled = model._compile_loss  # A loss too, the sum of the others.
    losses = [v for e in model._flatten_layers() for v in vars(e).values()]
    trackers = [model._loss_tracker]
    if compiled is not None:
        losses += [loss for _, loss, *_ in compiled._flat_losses]
        trackers += compiled.metrics
    for loss in losses:
        if isinstance(loss, keras.losses.Loss) and loss is not compiled:
            replace_methods(loss, _Weighted)
    for tracker in trackers:
        replace_methods(tracker, _Unweighted)


class _Weighted:
    """The method of a loss that weights it."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        losses = type(self).call(self, *args, **kwargs)
        if self.reduction in (None, "none", "sum"):
            return losses
        scalar = losses.shape.rank == 0
        scaled = _weigh(losses, _share() if scalar else _factor())
        mask = getattr(losses, "_keras_mask", None)
        if mask is not None:
            scaled._keras_mask = mask
        return scaled


class _Unweighted:
    """The method of a loss's metric, which multiplies by the replicas."""

    def update_state(self: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        factor = _factor()
        if factor is not None:
            value = tf.math.divide_no_nan(value, tf.cast(factor, value.dtype))
        return type(self).update_state(self, value, *args, **kwargs)


def _share() -> Any:
    return getattr(_local, "share", None)


def _factor() -> Any:
    """What Keras's own weight, one by the replicas, is to be multiplied by."""
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return None if _share() is None else _share() * float(replicas)


def _weigh(loss: Any, factor: Any) -> Any:
    if factor is None:
        return loss
    # Of no samples, a loss may be NaN.
    return tf.math.multiply_no_nan(loss, tf.cast(factor, loss.dtype))


def with_class_weights(
    data: tf.data.Dataset, weights: dict[int, float]
) -> tf.data.Dataset:
    """Returns a dataset with sample weights, by a class's number."""
    return data.map(tf_dataset_adapter.make_class_weight_map_fn(weights))
