"""The Keras layer around an engine: its place in a model's gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import tensorflow as tf
import tf_keras
from tensorflow.python.saved_model import save_context

from tfrs_embed import backward_passes, strategies
from tfrs_embed.checkpoint import slot_order
from tfrs_embed.checkpoint.names import escape, in_saved_model
from tfrs_embed.engines.engine import Engine
from tfrs_embed.engines.tables.state import Tables
from tfrs_embed.layers import errors, loss_scaling, updates
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.lookup import reshape_output
from tfrs_embed.weak_gradients import custom_gradient

# What is stored beside the tables.
_STORED = ("step",)


class EngineLayer(tf_keras.layers.Layer):
    """Looks up an engine's tables, and trains them in the backward pass.

    The tables are not trainable variables: Keras would make dense or
    all-reduced gradients of them. Instead the lookup is a custom gradient of
    one scalar trainable weight, whose backward pass hands the activations'
    gradients to the engine, where that weight's gradient is asked for. This
    gradient itself is zero.

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
        backward_passes.install()
        loss_scaling.install()

    @property
    def engine(self) -> Engine:
        """The engine."""
        return self._engine

    @property
    def embedding_tables(self) -> dict[Any, tf.Variable]:
        """The tables by the user's own table configs, deferred updates applied.

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
        self.step = self._engine.step
        # The attribute's name is in SavedModels.
        self.pending = self._engine.deferred
        for name, optimizer in self._engine.optimizers.items():
            rate = optimizer and optimizer.rate.variable
            if rate is not None:
                self._track_trackable(
                    rate, f"{in_saved_model(name)}_learning_rate"
                )
        if self._learns:
            self.gradient_trigger = self.add_weight(
                name="gradient_trigger",
                shape=(),
                initializer="zeros",
                dtype=tf.float32,
                experimental_autocast=False,
            )
            slot_order.mark(self.gradient_trigger, "gradient_trigger")
            self._switch = backward_passes.Switch(
                self.name, self.gradient_trigger, self._engine.local_replicas
            )
            # A SavedModel must find all that its functions read.
            for i, variable in enumerate(self._switch.variables):
                self._track_trackable(variable, f"backward_{i}")
        slot_order.install()
        super().build(input_shape)

    @errors.without_input_dump
    def call(
        self, bags: Sequence[BaggedIds], training: bool | None = None
    ) -> list[tf.Tensor]:
        """Looks up the features.

        Args:
            bags: each feature's bags.
            training: whether this is a training step; a pipelined engine's
                lookup only runs ahead of its updates in one. False: the tables
                are constants.

        Returns:
            Each feature's activations in its output shape, in the layer's
            compute dtype.
        """
        dtype = tf.as_dtype(self.compute_dtype)
        if not self._is_variable(training):
            vectors, _ = self._engine.lookup(bags, False, dtype)
            return self._outputs(vectors, bags)

        call = _Call(backward_passes.graph())
        # A graph may stay when nothing else does: TensorFlow keeps those that
        # have a custom gradient, of whatever kind. Tables must not stay too.
        this = weakref.ref(self) if call.graph != "eager" else lambda: self

        @custom_gradient
        def lookup(trigger: tf.Tensor) -> Any:
            vectors, residuals = self._engine.lookup(
                bags, bool(training), dtype
            )

            def backward(*gradients: Any) -> tf.Tensor:
                layer = this()
                if layer is None:
                    raise RuntimeError(
                        "The layer that looked these features up is gone."
                    )
                return layer._differentiate(call, residuals, gradients, trigger)

            return self._outputs(vectors, bags), backward

        outputs = lookup(self.gradient_trigger)
        return (
            list(outputs) if isinstance(outputs, (list, tuple)) else [outputs]
        )

    def _is_variable(self, training: Any) -> bool:
        """Whether a call's gradient may update the tables."""
        constant = training is not None and tf.get_static_value(training)
        return (
            self._learns
            and self.trainable
            and backward_passes.updates_allowed()
            and (training is None or constant is None or bool(constant))
        )

    def _outputs(
        self, vectors: Sequence[tf.Tensor], bags: Sequence[BaggedIds]
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

    def _differentiate(
        self,
        call: _Call,
        residuals: Any,
        given: Sequence[Any],
        trigger: tf.Tensor,
    ) -> tf.Tensor:
        """Updates the tables if this backward pass is to.

        Args:
            call: the forward pass.
            residuals: what the engine's lookup returned.
            given: the outputs' gradients.
            trigger: the scalar weight's value.

        Returns:
            The scalar weight's gradient.

        Raises:
            RuntimeError: the call's gradient has updated the tables before.
            NotImplementedError: they can't be updated where this is.
        """
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
            and all(p.asks_for(self.gradient_trigger) for p in passes)
        ):
            return tf.zeros_like(trigger)
        if save_context.in_save_context() and not self._is_saved():
            # Keras's `model.export` brings what the forward pass reads.
            text = f"Layer '{self.name}' was exported to serve, not to train."
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
                lambda: self._update_apart(residuals, gradients, trigger),
                autograph=False,
            )()
        if tf.executing_eagerly():
            if call.updated:
                raise backward_passes.too_often(self.name)
            call.updated = True
            return self._update(residuals, gradients, trigger)
        with updates.recording(call, self.name) as update:
            update.signal = self._update(residuals, gradients, trigger)
        return update.signal

    def _require_once(self, call: _Call, graph: Any, in_branch: bool) -> None:
        """Requires that what a graph does is done once for each lookup.

        Raises:
            NotImplementedError: they don't.
        """
        if in_branch:
            raise NotImplementedError(
                f"Layer '{self.name}' is called inside a tf.cond or "
                "tf.while_loop whose gradient is taken from outside; "
                "TensorFlow can't run a table's update there. Call the "
                "layer outside of it, or open the tape inside."
            )
        looped = type(graph).__name__.startswith("While")
        if graph != "eager" and (
            strategies.in_pfor() or (looped and call.graph is not graph)
        ):
            raise NotImplementedError(
                f"Layer '{self.name}': a Jacobian with respect to its tables, "
                "or a gradient taken in a loop, would update them many times. "
                "Leave the layer's variables out of its sources, or call the "
                "layer with training=False."
            )

    def _update(
        self, residuals: Any, gradients: list[tf.Tensor], trigger: tf.Tensor
    ) -> tf.Tensor:
        """Updates the tables; returns the scalar weight's gradient."""
        scaled_by = loss_scaling.current(f"Layer '{self.name}'")
        if scaled_by is None:
            self._engine.apply_gradients(residuals, gradients)
            return tf.zeros_like(trigger)
        finite = _unscale(gradients, scaled_by.loss_scale)
        if scaled_by.dynamic:
            return self._update_if(finite, residuals, gradients, trigger)
        self._engine.apply_gradients(residuals, gradients)
        return tf.zeros_like(trigger)

    def _update_if(
        self,
        good: tf.Tensor,
        residuals: Any,
        gradients: list[tf.Tensor],
        trigger: tf.Tensor,
    ) -> tf.Tensor:
        """The same if a scalar is true on all replicas."""

        def update() -> tf.Tensor:
            self._engine.apply_gradients(residuals, gradients)
            return tf.zeros_like(trigger)

        # Where the loss scale was too large Keras skips the step and lowers
        # it. It has to know: an infinite gradient tells it.
        infinite = tf.fill(tf.shape(trigger), float("inf"))
        return tf.cond(self._engine.all_agree(good), update, lambda: infinite)

    def _update_apart(
        self, residuals: Any, gradients: list[tf.Tensor], trigger: tf.Tensor
    ) -> tf.Tensor:
        """The same in a function's own gradient, which many passes run."""
        if strategies.in_tpu_replica():
            self._engine.apply_gradients(residuals, gradients)
            return tf.zeros_like(trigger)
        # What pass it is will only show when it runs. What sets the switch in
        # a function's gradient goes before the gradients that come from there.
        gradients = [tf.identity(g) for g in gradients]
        with tf.control_dependencies(gradients):
            scale = self._switch.value()

        def update() -> tf.Tensor:
            finite = _unscale(gradients, scale)
            return self._update_if(
                finite | tf.equal(scale, 1.0), residuals, gradients, trigger
            )

        return tf.cond(
            tf.equal(scale, backward_passes.OFF),
            lambda: tf.zeros_like(trigger),
            update,
        )

    @property
    def non_trainable_weights(self) -> list[tf.Variable]:
        """The tables, slots and step, deferred updates applied."""
        self._drain_eagerly()
        return super().non_trainable_weights

    def _drain_eagerly(self) -> None:
        # A function that is being traced must not apply updates as a side
        # effect of being asked for its variables.
        if self.built and tf.executing_eagerly():
            self._engine.apply_deferred()

    @tf.autograph.experimental.do_not_convert
    def drain(self) -> None:
        """Applies the updates that pipelining has deferred."""
        if self.built:
            self._engine.apply_deferred()

    def save_own_variables(self, store: Any) -> None:
        """Stores tables and slots by name, deferred updates applied."""
        self._drain_eagerly()
        for state in self._engine.states.values():
            for name, variable in state.variables.items():
                store[_store_key(state.spec.name, name)] = variable.numpy()
        store["step"] = self._engine.step.numpy()

    def load_own_variables(self, store: Any) -> None:
        """Loads what `save_own_variables` stored."""
        # A deferred update belongs to the tables that are being replaced.
        self._engine.drop_deferred()
        for state in self._engine.states.values():
            for name, variable in state.variables.items():
                key = _store_key(state.spec.name, name)
                if key not in store:  # As files had it that are older.
                    key = f"{state.spec.name}/{name}"
                variable.assign(store[key])
        self._engine.step.assign(store["step"])

    @property
    def _tracking_metadata(self) -> str:
        # Keras asks for it when it saves a model to be loaded as one.
        if not self._engine.has_whole_tables:
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


class _Call:
    """A forward pass.

    Args:
        graph: where it is; see `backward_passes.graph`.

    Attributes:
        updated: whether its gradient has updated the tables, eagerly.
    """

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.updated = False


def _unscale(gradients: list[tf.Tensor], scale: Any) -> tf.Tensor:
    """Divides gradients in place; returns whether all are finite."""
    scale = tf.cast(tf.convert_to_tensor(scale), tf.float32)
    gradients[:] = [g / scale for g in gradients]
    return tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
    )


def _store_key(table: str, variable: str) -> str:
    """The key of a table's variable in what Keras stores, a file of HDF5.

    There a slash parts groups, and a dot is a group itself.
    """
    group = escape(table, "/\0")
    if group in _STORED or group == ".":
        group = f"%{ord(group[0]):02X}{group[1:]}"
    return f"{group}/{variable}"


def _as_vectors(gradient: Any, dim: int) -> tf.Tensor:
    """An output's gradient as that of its vectors, [count, dim] float32."""
    # That of a gather is of the rows that it took.
    gradient = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
    if gradient.shape.rank != 2:
        return tf.reshape(gradient, [-1, dim])
    # That of a concatenation doesn't always say so.
    gradient.set_shape([None, dim])
    return gradient
