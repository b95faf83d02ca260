"""The gradient of an engine's lookup, which updates the engine's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfrs_embed.compat import kerases, strategies
from tfrs_embed.compat.private_tensorflow import save_context
from tfrs_embed.gradients import passes
from tfrs_embed.gradients.flag import NOT_ASKED, UNSAID, UpdateFlag


class _Engine(Protocol):
    """The part of `engines.engine.Engine` that updates need."""

    @property
    def features(self) -> Sequence[Any]: ...

    @property
    def together(self) -> Any: ...

    def apply_gradients(self, residuals: Any, gradients: Any) -> None: ...


class Lookup:
    """A lookup that a gradient may be taken of.

    Attributes:
        graph: the lookup's graph; see `passes.graph`.
        ended: whether the lookup has returned.
        updated: whether its gradient has updated the tables.
    """

    def __init__(self) -> None:
        self.graph = passes.graph()
        self.ended = False
        self.updated = False


class TableUpdate:
    """Updates an engine's tables in the backward passes that ask for it.

    Attributes:
        flag: tells a function's own gradient whether to update.
        saved_with: the options of the last SavedModel that holds the layer.
    """

    def __init__(
        self, name: str, engine: _Engine, trigger: tf.Variable
    ) -> None:
        self._name = name
        self._engine = engine
        self._trigger = trigger
        together = engine.together
        self.flag = UpdateFlag(
            name, trigger, together.local_replicas if together else 1
        )
        self.saved_with: Any = None

    def differentiate(
        self,
        lookup: Lookup,
        residuals: Any,
        given: Sequence[Any],
        trigger: tf.Tensor,
    ) -> tf.Tensor:
        """Updates the tables if this backward pass asks for it.

        Args:
            lookup: the lookup.
            residuals: the residuals of the engine's lookup.
            given: the outputs' gradients.
            trigger: the scalar weight's value.

        Returns:
            The scalar weight's gradient.

        Raises:
            RuntimeError: the lookup's gradient has updated the tables before.
            NotImplementedError: they can't be updated in this graph, or a
                `tf.autodiff.ForwardAccumulator` has a tangent of the weight.
        """
        if not lookup.ended:
            # An accumulator calls backward functions while it records.
            raise NotImplementedError(
                f"Layer '{self._name}' can't be differentiated forward, by a "
                "tf.autodiff.ForwardAccumulator, with respect to its tables. "
                "Leave the layer's variables out of the accumulator's primals, "
                "or call the layer with training=False."
            )
        graph = passes.graph()
        running = passes.here()
        branch = type(lookup.graph).__name__.startswith(("Cond", "While"))
        in_branch = branch and lookup.graph is not graph
        if in_branch and not running:
            # The branch's gradient is traced for the pass that asks for it.
            running = passes.all_passes()
        # The lookup may be in a tf.function of its own, whose gradient is
        # traced once, for all passes.
        apart = lookup.graph is not graph and not running
        if not apart and not (
            passes.updates_allowed()
            and all(p.asks_for(self._trigger) for p in running)
        ):
            return tf.zeros_like(trigger)
        if save_context.in_save_context() and not (
            # Traced for a training step that is saved, or the SavedModel holds
            # all of the layer.
            passes.all_passes()
            or self.saved_with is save_context.get_save_options()
        ):
            # `model.export` of Keras saves only variables of forward passes.
            text = f"Layer '{self._name}' was exported to serve, not to train."
            with tf.control_dependencies([tf.debugging.Assert(False, [text])]):
                return tf.zeros_like(trigger)
        self._require_once(lookup, graph, in_branch)
        gradients = [
            _as_vectors(gradient, feature.table.dim)
            for gradient, feature in zip(
                given, self._engine.features, strict=True
            )
        ]
        if apart:
            # In such a function TensorFlow only runs operations that the
            # gradients depend on, so the update has to be one operation that
            # returns a gradient.
            return tf.function(
                lambda: self._apply_apart(residuals, gradients, trigger),
                autograph=False,
            )()
        if lookup.updated:
            raise passes.duplicate_update_error(self._name)
        lookup.updated = True
        # Inner passes have the loss scale of the outer ones.
        scales = [p.scaled_by(self._name) for p in running]
        scaled_by = next((s for s in scales[::-1] if s is not None), None)
        if scaled_by is not None:
            finite = _unscale(gradients, kerases.loss_scale(scaled_by))
            if kerases.adapts_scale(scaled_by):
                return self._apply_if(finite, residuals, gradients, trigger)
        self._engine.apply_gradients(residuals, gradients)
        return tf.zeros_like(trigger)

    def _require_once(
        self, lookup: Lookup, graph: Any, in_branch: bool
    ) -> None:
        """Raises a NotImplementedError if a graph may run several times."""
        if in_branch:
            raise NotImplementedError(
                f"Layer '{self._name}' is called inside a tf.cond or "
                "tf.while_loop whose gradient is taken from outside; "
                "TensorFlow can't run a table's update there. Call the "
                "layer outside of it, or open the tape inside."
            )
        looped = type(graph).__name__.startswith("While")
        if graph != "eager" and (
            strategies.in_pfor() or (looped and lookup.graph is not graph)
        ):
            raise NotImplementedError(
                f"Layer '{self._name}': a Jacobian with respect to its tables, "
                "or a gradient taken in a loop, would update them many times. "
                "Leave the layer's variables out of its sources, or call the "
                "layer with training=False."
            )

    def _apply_if(
        self,
        good: tf.Tensor,
        residuals: Any,
        gradients: list[tf.Tensor],
        trigger: tf.Tensor,
    ) -> tf.Tensor:
        """Updates the tables if a scalar bool is true on all replicas."""

        def update() -> tf.Tensor:
            self._engine.apply_gradients(residuals, gradients)
            return tf.zeros_like(trigger)

        # If the loss scale was too large, Keras skips the step and lowers the
        # scale. An infinite gradient tells Keras.
        infinite = tf.fill(tf.shape(trigger), float("inf"))
        if together := self._engine.together:
            good = together.all_agree(good)
        return tf.cond(good, update, lambda: infinite)

    def _apply_apart(
        self, residuals: Any, gradients: list[tf.Tensor], trigger: tf.Tensor
    ) -> tf.Tensor:
        """Updates the tables in a function's own gradient, for many passes."""
        if strategies.in_tpu_replica():
            raise NotImplementedError(
                f"Layer '{self._name}' is called in a tf.function of its own "
                "in a TPU's program, which can't know the sources of a "
                "gradient. Call the layer in the function that strategy.run "
                "runs."
            )
        # The flag is set before this function receives gradients.
        gradients = [tf.identity(g) for g in gradients]
        with tf.control_dependencies(gradients):
            scale = passes.read(self.flag)
        said = tf.debugging.Assert(
            tf.not_equal(scale, UNSAID),
            [
                f"Layer '{self._name}' is called in a tf.function of its own, "
                "whose gradient is taken without saying whether it asks for "
                "the layer's tables: by tf.gradients, a "
                "tf.autodiff.ForwardAccumulator around the function, a tape "
                "that doesn't watch the layer's variables, a function that was "
                "loaded from a SavedModel, or another thread with the same "
                "layer. Take it by a plain tape, or call the layer in the "
                "function that takes the gradient. See docs/gradients.md."
            ],
        )
        with tf.control_dependencies([said]):
            scale = tf.identity(scale)

        def update() -> tf.Tensor:
            finite = _unscale(gradients, scale)
            return self._apply_if(
                finite | tf.equal(scale, 1.0), residuals, gradients, trigger
            )

        return tf.cond(
            tf.equal(scale, NOT_ASKED), lambda: tf.zeros_like(trigger), update
        )


def _unscale(gradients: list[tf.Tensor], scale: Any) -> tf.Tensor:
    """Divides gradients in place; returns whether all are finite."""
    scale = tf.cast(tf.convert_to_tensor(scale), tf.float32)
    gradients[:] = [g / scale for g in gradients]
    return tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
    )


def _as_vectors(gradient: Any, dim: int) -> tf.Tensor:
    """An output's gradient, reshaped to [count, dim] float32."""
    # The gradient of a gather is IndexedSlices.
    gradient = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
    if gradient.shape.rank != 2:
        return tf.reshape(gradient, [-1, dim])
    # The gradient of a concatenation may have an unknown shape.
    gradient.set_shape([None, dim])
    return gradient
