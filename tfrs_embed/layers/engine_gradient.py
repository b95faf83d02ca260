"""The gradient of an engine's lookup, which updates the engine's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed import backward_passes, strategies
from tfrs_embed._tensorflow import save_context
from tfrs_embed.engines.engine import Engine
from tfrs_embed.layers import loss_scaling, updates


class ForwardPass:
    """A forward pass.

    Args:
        graph: where it is; see `backward_passes.graph`.

    Attributes:
        ended: whether the lookup has returned.
        updated: whether its gradient has updated the tables, eagerly.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.ended = False
        self.updated = False


class EngineGradient:
    """Updates an engine's tables in the backward passes that ask for it.

    Args:
        name: the layer's name, for errors.
        engine: the engine.
        trigger: the scalar weight whose gradient is asked for.

    Attributes:
        switch: what a function's own gradient reads of the pass it is in.
        saved_with: the options of the last SavedModel that holds the layer.
    """

    def __init__(self, name: str, engine: Engine, trigger: tf.Variable) -> None:
        self._name = name
        self._engine = engine
        self._trigger = trigger
        together = engine.together
        self.switch = backward_passes.Switch(
            name, trigger, together.local_replicas if together else 1
        )
        self.saved_with: Any = None

    def update(
        self,
        call: ForwardPass,
        residuals: Any,
        given: Sequence[Any],
        trigger: tf.Tensor,
    ) -> tf.Tensor:
        """Updates the tables if this backward pass is to.

        Args:
            call: the forward pass.
            residuals: the residuals of the engine's lookup.
            given: the outputs' gradients.
            trigger: the scalar weight's value.

        Returns:
            The scalar weight's gradient.

        Raises:
            RuntimeError: the call's gradient has updated the tables before.
            NotImplementedError: they can't be updated where this is, or a
                `tf.autodiff.ForwardAccumulator` has a tangent of the weight.
        """
        if not call.ended:
            # An accumulator runs a backward function when it is recorded.
            raise NotImplementedError(
                f"Layer '{self._name}' can't be differentiated forward, by a "
                "tf.autodiff.ForwardAccumulator, with respect to its tables. "
                "Leave the layer's variables out of the accumulator's primals, "
                "or call the layer with training=False."
            )
        graph = backward_passes.graph()
        passes = backward_passes.here()
        branch = type(call.graph).__name__.startswith(("Cond", "While"))
        in_branch = branch and call.graph is not graph
        if in_branch and not passes:
            # Its gradient is traced for the pass that asks for it.
            passes = backward_passes.all_passes()
        # The forward pass may be a tf.function of its own, whose gradient is
        # traced once, for all passes.
        apart = call.graph is not graph and not passes
        if not apart and not (
            backward_passes.updates_allowed()
            and all(p.asks_for(self._trigger) for p in passes)
        ):
            return tf.zeros_like(trigger)
        if save_context.in_save_context() and not (
            # It is traced for a training step that is saved.
            backward_passes.all_passes() or self._is_saved()
        ):
            # Keras's `model.export` brings what the forward pass reads.
            text = f"Layer '{self._name}' was exported to serve, not to train."
            with tf.control_dependencies([tf.debugging.Assert(False, [text])]):
                return tf.zeros_like(trigger)
        self._require_once(call, graph, in_branch)
        gradients = [
            _as_vectors(gradient, feature.table.dim)
            for gradient, feature in zip(
                given, self._engine.features, strict=True
            )
        ]
        if apart:
            # TensorFlow runs nothing in such a function that the gradients
            # don't depend on, so the update has to be one operation that
            # returns a gradient.
            return tf.function(
                lambda: self._apply_apart(residuals, gradients, trigger),
                autograph=False,
            )()
        if tf.executing_eagerly():
            if call.updated:
                raise backward_passes.too_often(self._name)
            call.updated = True
            return self._apply(residuals, gradients, trigger)
        with updates.recording(call, self._name) as update:
            update.signal = self._apply(residuals, gradients, trigger)
        return update.signal

    def _require_once(
        self, call: ForwardPass, graph: Any, in_branch: bool
    ) -> None:
        """Requires that what a graph does is done once for each lookup.

        Raises:
            NotImplementedError: they don't.
        """
        if in_branch:
            raise NotImplementedError(
                f"Layer '{self._name}' is called inside a tf.cond or "
                "tf.while_loop whose gradient is taken from outside; "
                "TensorFlow can't run a table's update there. Call the "
                "layer outside of it, or open the tape inside."
            )
        looped = type(graph).__name__.startswith("While")
        if graph != "eager" and (
            strategies.in_pfor() or (looped and call.graph is not graph)
        ):
            raise NotImplementedError(
                f"Layer '{self._name}': a Jacobian with respect to its tables, "
                "or a gradient taken in a loop, would update them many times. "
                "Leave the layer's variables out of its sources, or call the "
                "layer with training=False."
            )

    def _apply(
        self, residuals: Any, gradients: list[tf.Tensor], trigger: tf.Tensor
    ) -> tf.Tensor:
        """Updates the tables; returns the scalar weight's gradient."""
        scaled_by = loss_scaling.current(f"Layer '{self._name}'")
        if scaled_by is None:
            self._engine.apply_gradients(residuals, gradients)
            return tf.zeros_like(trigger)
        finite = _unscale(gradients, scaled_by.loss_scale)
        if scaled_by.dynamic:
            return self._apply_if(finite, residuals, gradients, trigger)
        self._engine.apply_gradients(residuals, gradients)
        return tf.zeros_like(trigger)

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

        # Where the loss scale was too large Keras skips the step and lowers
        # it. It has to know: an infinite gradient tells it.
        infinite = tf.fill(tf.shape(trigger), float("inf"))
        if together := self._engine.together:
            good = together.all_agree(good)
        return tf.cond(good, update, lambda: infinite)

    def _apply_apart(
        self, residuals: Any, gradients: list[tf.Tensor], trigger: tf.Tensor
    ) -> tf.Tensor:
        """Updates the tables in a function's own gradient, for many passes."""
        if strategies.in_tpu_replica():
            self._engine.apply_gradients(residuals, gradients)
            return tf.zeros_like(trigger)
        # Only the running pass shows which one it is. The operation that sets
        # the switch runs before the gradients that this function receives.
        gradients = [tf.identity(g) for g in gradients]
        with tf.control_dependencies(gradients):
            scale = self.switch.value()

        def update() -> tf.Tensor:
            finite = _unscale(gradients, scale)
            return self._apply_if(
                finite | tf.equal(scale, 1.0), residuals, gradients, trigger
            )

        return tf.cond(
            tf.equal(scale, backward_passes.OFF),
            lambda: tf.zeros_like(trigger),
            update,
        )

    def _is_saved(self) -> bool:
        """Whether the SavedModel that is being made holds all of the layer."""
        return self.saved_with is save_context.get_save_options()


def _unscale(gradients: list[tf.Tensor], scale: Any) -> tf.Tensor:
    """Divides gradients in place; returns whether all are finite."""
    scale = tf.cast(tf.convert_to_tensor(scale), tf.float32)
    gradients[:] = [g / scale for g in gradients]
    return tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
    )


def _as_vectors(gradient: Any, dim: int) -> tf.Tensor:
    """An output's gradient as that of its vectors, [count, dim] float32."""
    # That of a gather is of the rows that it took.
    gradient = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
    if gradient.shape.rank != 2:
        return tf.reshape(gradient, [-1, dim])
    # That of a concatenation doesn't always say so.
    gradient.set_shape([None, dim])
    return gradient
