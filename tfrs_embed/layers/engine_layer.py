"""The Keras layer around an engine: its place in a model's gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras
from tensorflow.python.saved_model import save_context

from tfrs_embed import loss_scaling
from tfrs_embed.engines.engine import Engine, Tables
from tfrs_embed.layers import errors
from tfrs_embed.ops.bags import Bags
from tfrs_embed.ops.lookup import reshape_output


class EngineLayer(tf_keras.layers.Layer):
    """Looks up an engine's tables, and trains them in the backward pass.

    The tables are not trainable variables: Keras would make dense or
    all-reduced gradients of them. Instead the lookup is a custom gradient of
    one scalar trainable weight, whose backward pass hands the activations'
    gradients to the engine. The weight's own gradient is zero.

    The layer has no training if no table has an optimizer.

    Args:
        engine: the engine.
        **kwargs: `name`, `dtype`, `trainable`, as in every Keras layer.
    """

    def __init__(self, engine: Engine, **kwargs: Any) -> None:
        super().__init__(autocast=False, **kwargs)
        self._supports_ragged_inputs = True
        self._engine = engine
        self.tables = Tables(list(engine.states.values()))
        # Of the last SavedModel that holds it.
        self._saved_with: Any = None
        self._learns = any(o is not None for o in engine.optimizers.values())
        loss_scaling.install()

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._engine

    @property
    def embedding_tables(self) -> dict[Any, tf.Variable]:
        """The tables by the user's own table configs, pending updates applied.

        Shapes are [vocabulary_size, dim].
        """
        self.ensure_built()
        self._drain_eagerly()
        return {
            state.spec.source: state.table
            for state in self._engine.states.values()
        }

    def ensure_built(self) -> None:
        """Creates the variables if they aren't there yet."""
        if not self.built:
            self.build(None)

    def build(self, input_shape: Any = None) -> None:
        """Creates the tables, their slots and the scalar weight."""
        self._engine.build()
        # Replicas that build the layer each come by here.
        self._non_trainable_weights[:] = self._engine.variables
        # A SavedModel must find all that its functions read.
        self._track_trackable(loss_scaling.in_effect(), "loss_scale")
        self.step = self._engine.step
        self.pending = getattr(self._engine, "pending", None)
        for name, optimizer in self._engine.optimizers.items():
            rate = optimizer and optimizer.rate.variable
            if rate is not None:
                self._track_trackable(rate, f"{name}_learning_rate")
        if self._learns:
            self.gradient_trigger = self.add_weight(
                name="gradient_trigger",
                shape=(),
                initializer="zeros",
                dtype=tf.float32,
                experimental_autocast=False,
            )
        super().build(input_shape)

    @errors.plain
    def call(
        self, bags: Sequence[Bags], training: bool | None = None
    ) -> list[tf.Tensor]:
        """Looks up the features.

        Args:
            bags: each feature's bags.
            training: whether this is a training step; a pipelined engine's
                lookup only runs ahead of its updates in one.

        Returns:
            Each feature's activations in its output shape, in the layer's
            compute dtype.
        """
        dtype = tf.as_dtype(self.compute_dtype)
        if not (self._learns and self.trainable):
            vectors, _ = self._engine.lookup(bags, False, dtype)
            return self._outputs(vectors, bags)

        forward_graph = loss_scaling.graph()

        @tf.custom_gradient
        def lookup(trigger: tf.Tensor) -> Any:
            vectors, residuals = self._engine.lookup(
                bags, bool(training), dtype
            )

            def backward(*gradients: tf.Tensor) -> tf.Tensor:
                return self._apply(
                    residuals,
                    [
                        _as_vectors(gradient, feature.table.dim)
                        for gradient, feature in zip(
                            gradients, self._engine.features, strict=True
                        )
                    ],
                    trigger,
                    forward_graph,
                )

            return self._outputs(vectors, bags), backward

        outputs = lookup(self.gradient_trigger)
        return (
            list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        )

    def _outputs(
        self, vectors: Sequence[tf.Tensor], bags: Sequence[Bags]
    ) -> list[tf.Tensor]:
        return [
            tf.cast(
                reshape_output(vector, b, feature.table.dim),
                self.compute_dtype,
            )
            for vector, b, feature in zip(
                vectors, bags, self._engine.features, strict=True
            )
        ]

    def _apply(
        self,
        residuals: Any,
        gradients: list[tf.Tensor],
        trigger: tf.Tensor,
        forward_graph: Any,
    ) -> tf.Tensor:
        """Updates the tables and returns the scalar weight's gradient."""
        if save_context.in_save_context() and not self._is_saved():
            # Keras's `model.export` brings what the forward pass reads.
            text = f"Layer '{self.name}' was exported to serve, not to train."
            with tf.control_dependencies([tf.debugging.Assert(False, [text])]):
                return tf.zeros_like(trigger)

        def update() -> tf.Tensor:
            self._engine.apply_gradients(residuals, gradients)
            return tf.zeros_like(trigger)

        def update_if(good: tf.Tensor) -> tf.Tensor:
            good = self._engine.all_agree(good)
            # Where the loss scale was too large Keras skips the step and lowers
            # it. It has to know: an infinite gradient tells it.
            infinite = tf.fill(tf.shape(trigger), float("inf"))
            return tf.cond(good, update, lambda: infinite)

        def unscale(scale: Any) -> tf.Tensor:
            """Divides the gradients, and returns whether they are finite."""
            scale = tf.cast(tf.convert_to_tensor(scale), tf.float32)
            gradients[:] = [g / scale for g in gradients]
            return tf.reduce_all(
                [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
            )

        def update_apart() -> tf.Tensor:
            # Whether the step scales its loss will only show when it runs.
            scale = tf.convert_to_tensor(loss_scaling.in_effect())
            return update_if(unscale(scale) | tf.equal(scale, 1.0))

        if forward_graph is not loss_scaling.graph():
            if type(forward_graph).__name__.startswith(("Cond", "While")):
                raise NotImplementedError(
                    f"Layer '{self.name}' is called inside a tf.cond or "
                    "tf.while_loop whose gradient is taken from outside; "
                    "TensorFlow can't run a table's update there. Call the "
                    "layer outside of it, or open the tape inside."
                )
            # The forward pass is a tf.function of its own. TensorFlow runs
            # nothing in its backward pass that the gradients don't depend on,
            # so the update has to be one operation that returns a gradient.
            return tf.function(update_apart, autograph=False)()
        scaled_by = loss_scaling.current()
        if scaled_by is None:
            return update()
        finite = unscale(scaled_by.loss_scale)
        return update_if(finite) if scaled_by.dynamic else update()

    @property
    def non_trainable_weights(self) -> list[tf.Variable]:
        """The tables, slots and step, pending updates applied."""
        self._drain_eagerly()
        return super().non_trainable_weights

    def _drain_eagerly(self) -> None:
        # A function that is being traced must not apply updates as a side
        # effect of being asked for its variables.
        if self.built and tf.executing_eagerly():
            self._engine.drain()

    @tf.autograph.experimental.do_not_convert
    def drain(self) -> None:
        """Applies the updates that pipelining has put off."""
        if self.built:
            self._engine.drain()

    def save_own_variables(self, store: Any) -> None:
        """Stores tables and slots by name, pending updates applied."""
        self._drain_eagerly()
        for state in self._engine.states.values():
            for name, variable in state.variables.items():
                store[f"{state.spec.name}/{name}"] = variable.numpy()
        store["step"] = self._engine.step.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads what `save_own_variables` stored."""
        # A pending update belongs to the tables that are being replaced.
        self._engine.drop_pending()
        for state in self._engine.states.values():
            for name, variable in state.variables.items():
                variable.assign(store[f"{state.spec.name}/{name}"])
        self._engine.step.assign(store["step"])

    @property
    def _tracking_metadata(self) -> str:
        # Keras asks for it when it saves a model to be loaded as one.
        if not self._engine.held_whole:
            raise NotImplementedError(
                f"Layer '{self.name}' has sharded tables, which Keras can't "
                "load from its SavedModel format. Save as .keras or .h5, or "
                "save weights; tf.saved_model.save exports for serving."
            )
        return super()._tracking_metadata

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        self._drain_eagerly()
        if save_type == "savedmodel" and save_context.in_save_context():
            self._saved_with = save_context.get_save_options()
        return super()._trackable_children(save_type, **kwargs)

    def _is_saved(self) -> bool:
        """Whether the SavedModel that is being made holds all of the layer."""
        return self._saved_with is save_context.get_save_options()


def _as_vectors(gradient: tf.Tensor, dim: int) -> tf.Tensor:
    """An output's gradient as that of its vectors, [count, dim] float32."""
    gradient = tf.cast(gradient, tf.float32)
    if gradient.shape.rank != 2:
        return tf.reshape(gradient, [-1, dim])
    # That of a concatenation doesn't always say so.
    gradient.set_shape([None, dim])
    return gradient
