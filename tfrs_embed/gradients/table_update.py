"""The gradient of an engine's lookup, which updates the engine's tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import tensorflow as tf

from tfrs_embed.compat import keras_versions, strategies
from tfrs_embed.compat.private_tensorflow import save_context
from tfrs_embed.gradients import passes


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


class GradientUpdate:
    """Updates an engine's tables in the backward passes that ask for it."""

    def __init__(
        self, name: str, engine: _Engine, trigger: tf.Variable
    ) -> None:
        self.name = name
        self.trigger = trigger
        self.is_read = False
        self._engine = engine
        passes.add(self)

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
            ValueError: several optimizers have scaled the loss.
            NotImplementedError: they can't be updated in this graph, or a
                `tf.autodiff.ForwardAccumulator` has a tangent of the weight.
        """
        if not lookup.ended:
            # An accumulator calls backward functions while it records.
            raise NotImplementedError(
                f"Layer '{self.name}' can't be differentiated forward, by a "
                "tf.autodiff.ForwardAccumulator, with respect to its tables. "
                "Leave the layer's variables out of the accumulator's primals, "
                "or call the layer with training=False."
            )
        graph = passes.graph()
        running, own, in_branch = _running(lookup)
        if own and save_context.in_save_context() and not passes.all_passes():
            return self._refuse_export(trigger)
        if not passes.asked(self, running):
            return tf.zeros_like(trigger)
        self._require_once(lookup, graph, in_branch)
        dims = [feature.table.dim for feature in self._engine.features]
        shapes: dict[int, Any] = {dim: [-1, dim] for dim in dims}
        if not strategies.in_tpu_replica():
            # Features share constants, which take long to trace.
            shapes = {dim: tf.constant(shape) for dim, shape in shapes.items()}
        gradients = [
            _as_vectors(gradient, dim, shapes[dim])
            for gradient, dim in zip(given, dims, strict=True)
        ]
        if own:
            if strategies.in_tpu_replica():
                raise NotImplementedError(
                    f"Layer '{self.name}' is called in a tf.function of its "
                    "own in a TPU's program, which can't be trained. Call the "
                    "layer in the function that takes the gradient; or with "
                    "training=False, if its tables are to stay as they are."
                )
            # TensorFlow drops what a function's gradient does beside its
            # results, so the update is one operation that returns one.
            update = tf.function(
                lambda: self._apply_if_asked(residuals, gradients, trigger),
                autograph=False,
            )
            return tf.stop_gradient(update())
        if lookup.updated:
            raise RuntimeError(
                f"Layer '{self.name}': the gradient of one lookup is taken a "
                "second time, by a persistent tape, or by several. Its tables "
                "are updated in the backward pass, and would be twice. Ask for "
                "the layer's gradients once, of the sum of all losses; other "
                "gradients can be taken as often as wanted if the layer's "
                "variables are not among the sources. See docs/gradients.md."
            )
        optimizer = passes.scaled_by(self, running)
        lookup.updated = True
        if optimizer is not None:
            finite = _unscale(gradients, keras_versions.loss_scale(optimizer))
            if keras_versions.adapts_scale(optimizer):
                return self._apply_if(finite, residuals, gradients, trigger)
        self._engine.apply_gradients(residuals, gradients)
        return tf.zeros_like(trigger)

    def refuse_read(
        self, lookup: Lookup, table: str, rows: int, trigger: tf.Tensor
    ) -> tf.Tensor:
        """Raises a NotImplementedError if a read table's gradient is asked for.

        The read is of a table by itself, not a lookup of the layer. In a
        function's own gradient it is an InvalidArgumentError.

        Args:
            lookup: the read.
            table: the table's name.
            rows: how many rows it has.
            trigger: the scalar weight's value.

        Returns:
            The scalar weight's gradient.
        """
        running, own, _ = _running(lookup)
        if (
            not lookup.ended  # An accumulator records.
            # TensorFlow traces gradients that nothing asks for.
            or save_context.in_save_context()
            or not passes.asked(self, running)
        ):
            return tf.zeros_like(trigger)
        text = (
            f"Layer '{self.name}': a gradient is taken of table '{table}' "
            "where the table was read by itself (embedding_tables, or "
            "weights), which would train nothing: a table is trained by "
            "the layer's lookups. Look all rows up by a second feature, "
            f"FeatureConfig('all', <the config of '{table}'>), of the ids "
            f"tf.range({rows}), in the same call of the layer; or read the "
            "table as a constant, by tf.stop_gradient. See docs/gradients.md."
        )
        if not own:
            raise NotImplementedError(text)
        constant = tf.equal(passes.read(self), passes.NOT_ASKED)
        with tf.control_dependencies([tf.debugging.Assert(constant, [text])]):
            return tf.zeros_like(trigger)

    def _refuse_export(self, trigger: tf.Tensor) -> tf.Tensor:
        """Raises when the gradient of an exported function runs.

        For a SavedModel TensorFlow traces gradients that nothing asks for.
        """
        text = [f"Layer '{self.name}' was exported to serve, not to train."]
        with tf.control_dependencies([tf.debugging.Assert(False, text)]):
            return tf.zeros_like(trigger)

    def _require_once(
        self, lookup: Lookup, graph: Any, in_branch: bool
    ) -> None:
        """Raises a NotImplementedError if a graph may run several times."""
        if in_branch:
            raise NotImplementedError(
                f"Layer '{self.name}' is called inside a tf.cond or "
                "tf.while_loop whose gradient is taken from outside; "
                "TensorFlow can't run a table's update there. Call the "
                "layer outside of it, or open the tape inside."
            )
        looped = type(graph).__name__.startswith("While")
        if graph != "eager" and (
            strategies.in_pfor() or (looped and lookup.graph is not graph)
        ):
            raise NotImplementedError(
                f"Layer '{self.name}': a Jacobian with respect to its tables, "
                "or a gradient taken in a loop, would update them many times. "
                "Leave the layer's variables out of its sources, or call the "
                "layer with training=False."
            )

    def _apply_if_asked(
        self, residuals: Any, gradients: list[tf.Tensor], trigger: tf.Tensor
    ) -> tf.Tensor:
        """Updates the tables in a function's own gradient, for many passes."""
        gradients = [tf.identity(g) for g in gradients]
        with tf.control_dependencies(gradients):
            said = passes.read(self)
        text = (
            f"Layer '{self.name}' is called in a tf.function of its own, whose "
            "gradient is taken without saying whether it asks for the layer's "
            "tables: by tf.gradients, a tf.autodiff.ForwardAccumulator around "
            "the function, or in a function loaded from a SavedModel. Take it "
            "by a tape, call the layer in the function that takes the "
            "gradient, or with training=False. See docs/gradients.md."
        )
        known = tf.debugging.Assert(tf.not_equal(said, 0.0), [text])
        with tf.control_dependencies([known]):
            asked = tf.not_equal(said, passes.NOT_ASKED)
        good = _unscale(gradients, tf.abs(said)) | (said > 0)
        skipped = tf.where(asked, float("inf"), 0.0)
        return self._apply_if(
            asked & good, residuals, gradients, trigger, skipped
        )

    def _apply_if(
        self,
        good: tf.Tensor,
        residuals: Any,
        gradients: list[tf.Tensor],
        trigger: tf.Tensor,
        skipped: Any = float("inf"),
    ) -> tf.Tensor:
        """Updates the tables if a scalar bool is true on all replicas.

        Otherwise it returns `skipped`. If the loss scale was too large, Keras
        skips the step and lowers the scale. An infinite gradient tells Keras.
        """

        def update() -> tf.Tensor:
            self._engine.apply_gradients(residuals, gradients)
            return tf.zeros_like(trigger)

        skipped = tf.fill(tf.shape(trigger), skipped)
        together = self._engine.together
        if together:
            good = together.all_agree(good)
        return tf.cond(good, update, lambda: skipped)


def _running(lookup: Lookup) -> tuple[list[passes.Pass], bool, bool]:
    """Returns the passes of a gradient, and where it is traced.

    The first bool is whether it is a function's own gradient, for all passes;
    the second, whether the lookup is in a branch or loop that it is not in.
    """
    graph = passes.graph()
    running = passes.current_passes()
    own = passes.in_own_gradient()
    branch = type(lookup.graph).__name__.startswith(("Cond", "While"))
    in_branch = branch and lookup.graph is not graph
    if in_branch and not running:
        # The branch's gradient is traced for the pass that asks for it,
        # unless it is part of a function's own gradient.
        running = [] if own else passes.all_passes()
    elif lookup.graph is not graph and not running:
        own = True
    return running, own, in_branch


def _unscale(gradients: list[tf.Tensor], scale: Any) -> tf.Tensor:
    """Divides gradients in place; returns whether all are finite."""
    scale = tf.cast(tf.convert_to_tensor(scale), tf.float32)
    gradients[:] = [g / scale for g in gradients]
    return tf.reduce_all(
        [tf.reduce_all(tf.math.is_finite(g)) for g in gradients]
    )


def _as_vectors(gradient: Any, dim: int, shape: Any) -> tf.Tensor:
    """An output's gradient, reshaped to `shape`, [count, dim] float32."""
    # The gradient of a gather is IndexedSlices.
    gradient = tf.cast(tf.convert_to_tensor(gradient), tf.float32)
    if gradient.shape.rank != 2:
        return tf.reshape(gradient, shape)
    # The gradient of a concatenation may have an unknown shape.
    gradient.set_shape([None, dim])
    return gradient
