"""The gradients that programs take, and whether they ask for a table's."""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import weakref
from collections.abc import Iterator
from typing import Any, Protocol

import tensorflow as tf

from tfrs_embed.compat import (
    custom_gradients,
    graphs,
    keras_versions,
    strategies,
)

#: A trigger's value in a pass that doesn't ask for the layer's tables.
NOT_ASKED = float("inf")


class Trigger(Protocol):
    """The scalar weight of a layer with tables.

    A function's own gradient is traced once, for all passes, so the weight's
    value tells it whether to update: 0 outside of passes; `NOT_ASKED`;
    otherwise the factor on the loss, negative if its optimizer adapts it.
    """

    name: str
    trigger: tf.Variable
    #: Whether a function's own gradient reads the value.
    is_read: bool


class _Thread(threading.local):
    """The passes that a thread runs, the outermost first."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []


_thread = _Thread()

# The number of `no_updates` blocks in effect, by graph.
_constant: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

# All of them. Threads add some.
_layers: weakref.WeakSet[Trigger] = weakref.WeakSet()
_lock = threading.Lock()


def add(layer: Trigger) -> None:
    """Adds a layer to those that passes tell whether to update."""
    with _lock:
        _layers.add(layer)


def layers() -> list[Trigger]:
    """All layers with tables that learn."""
    with _lock:
        return list(_layers)


class Pass:
    """A call of `tape.gradient`, while it runs.

    Attributes:
        graph: the graph that the call is traced in; see `graph`.
        sources: the nest of sources, tensors and variables.
        scaled_by: the `LossScaleOptimizer`s that scaled the loss.
        told: the layers whose triggers have a value for this pass.
    """

    def __init__(self, tape: tf.GradientTape, sources: Any) -> None:
        self.graph = graph()
        self.sources = sources
        self.scaled_by: list[Any] = []
        self._tape = tape
        # The ids of the sources' handles.
        self._handles: set[int] | None = None
        self.told: list[Trigger] = []
        # Part of a function's own gradient, which another pass runs.
        self._in_own_gradient = in_own_gradient()

    def asks_for(self, variable: tf.Variable) -> bool:
        """Whether a variable is among the sources."""
        if self._handles is None:
            sources = tf.nest.flatten(self.sources)
            self._handles = {id(_handle(source)) for source in sources}
        return id(_handle(variable)) in self._handles

    def scale(self, optimizer: Any) -> None:
        """Notes that an optimizer has scaled the loss."""
        if optimizer not in self.scaled_by:
            self.scaled_by.append(optimizer)
            for layer in self.told:
                _tell(layer)

    def watches(self, layer: Trigger) -> bool:
        """Whether the tape has recorded a trigger."""
        watched = self._tape.watched_variables()
        return any(same(layer.trigger, variable) for variable in watched)

    def tell(self, layer: Trigger) -> None:
        """Sets a trigger's value for this pass, if it may run its layer.

        Raises:
            NotImplementedError: in `tf.vectorized_map` or a Jacobian.
        """
        if layer in self.told or self._in_own_gradient:
            return
        if self._tape._watch_accessed_variables:
            # Another thread's pass may be about to read the value.
            runs = self.watches(layer)
        else:
            handle = _handle(layer.trigger)
            runs = self.graph == "eager" or any(
                outer is handle for outer, _ in self.graph.captures
            )
        if not runs:
            return
        # A function's own gradient may be traced now.
        with (
            tf.init_scope()
            if self.graph == "eager"
            else self.graph.as_default()
        ):
            if strategies.in_pfor():
                raise NotImplementedError(
                    f"Layer '{layer.name}' is called in a tf.function of its "
                    "own, whose gradient TensorFlow can't take in a Jacobian "
                    "or tf.vectorized_map. Call the layer outside of such a "
                    "function, or with training=False."
                )
            if self.graph != "eager":
                # It refers to tables, by the function that it calls.
                custom_gradients.move_all(self.graph)
            self.told.append(layer)
            _tell(layer)

    def begin(self) -> list[tf.Variable]:
        """Tells all layers; returns triggers to differentiate by, too.

        TensorFlow may inline a function and forget what is to run after it, so
        the triggers' gradients say that they were read.
        """
        for layer in layers():
            if layer.is_read:
                self.tell(layer)
        eager = self.graph == "eager"
        return [] if eager else [layer.trigger for layer in self.told]

    def end(self, gradients: Any) -> None:
        """Resets the triggers' values, after those of `begin` were read."""
        # Such a function's control outputs forget it, its results don't.
        waits = [tf.identity(g) for g in gradients if g is not None]
        with tf.control_dependencies(waits):
            for layer in self.told:
                _tell(layer)

    def explain(self, error: Exception) -> None:
        """Raises a NotImplementedError for TensorFlow's error in a branch.

        The gradient of a branch or loop can't use variables that its forward
        pass doesn't use, as a table's slots.
        """
        if self.told and re.search(
            r"Tensor\.graph is undefined|internal_captures", str(error)
        ):
            raise NotImplementedError(
                f"Layer '{self.told[0].name}' is called inside a tf.cond or "
                "tf.while_loop, in a tf.function of its own, and the gradient "
                "is taken from outside; TensorFlow can't run a table's update "
                "there. Call it outside of the branch, or open the tape inside."
            ) from error


def _tell(layer: Trigger) -> None:
    """Sets a trigger's value for the passes in the current graph."""
    running = current_passes()
    if not any(layer in p.told for p in running):
        value: Any = 0.0
    elif not (asked(layer, running) and running[-1].watches(layer)):
        value = NOT_ASKED
    else:
        optimizer = scaled_by(layer, running)
        value = 1.0
        if optimizer is not None:
            value = tf.cast(keras_versions.loss_scale(optimizer), tf.float32)
            value = -value if keras_versions.adapts_scale(optimizer) else value
    tf.raw_ops.AssignVariableOp(
        resource=layer.trigger.handle, value=tf.cast(value, tf.float32)
    )


def read(layer: Trigger) -> tf.Tensor:
    """The trigger's value when the function that is being traced runs."""
    layer.is_read = True
    # This function may be traced in a pass, and first run by it.
    for running in all_passes():
        running.tell(layer)
    return tf.raw_ops.ReadVariableOp(
        resource=layer.trigger.handle, dtype=tf.float32
    )


def asked(layer: Trigger, running: list[Pass]) -> bool:
    """Whether all of some passes ask for a layer's tables."""
    return updates_allowed() and all(p.asks_for(layer.trigger) for p in running)


def scaled_by(layer: Trigger, running: list[Pass]) -> Any:
    """The `LossScaleOptimizer` that scaled the loss of passes, or None.

    Raises:
        ValueError: several did.
    """
    # Inner passes have the loss scale of the outer ones.
    scaled = next((p.scaled_by for p in running[::-1] if p.scaled_by), [])
    if len(scaled) > 1:
        raise ValueError(
            f"Layer '{layer.name}': losses that different LossScaleOptimizers "
            "scaled are differentiated together, so what the tables' gradients "
            "are scaled by can't be known. Take the gradient of each loss by "
            "itself."
        )
    return scaled[0] if scaled else None


def _handle(value: object) -> object:
    """A variable's handle on this device, or the value itself."""
    try:
        return getattr(value, "handle", value)
    except ValueError:
        # A mirrored variable has no handle outside of replicas.
        return value


def same(one: tf.Variable, other: tf.Variable) -> bool:
    """Whether two variables are one on this device."""
    return _handle(one) is _handle(other)


def graph() -> Any:
    """Returns the graph being traced; a constant when executing eagerly."""
    if tf.executing_eagerly():
        return "eager"
    return tf.compat.v1.get_default_graph()


def current_passes() -> list[Pass]:
    """The passes that run in the current graph, the outermost first."""
    current = graph()
    return [p for p in _thread.passes if p.graph is current]


def in_own_gradient() -> bool:
    """Whether the gradient of a `tf.function` is traced, for all passes."""
    return not tf.executing_eagerly() and any(
        getattr(each, "name", "").startswith("__backward_")
        for each in graphs.traced()
    )


def all_passes() -> list[Pass]:
    """The passes that this thread runs, the outermost first."""
    return list(_thread.passes)


def updates_allowed() -> bool:
    """Whether no block of `no_updates` is in effect."""
    return not any(each in _constant for each in graphs.traced())


@contextlib.contextmanager
def no_updates() -> Iterator[None]:
    """Makes tables constants.

    Layers that are called inside look their features up, and no gradient
    reaches their tables; a `tape.gradient` inside updates none either. It
    holds for this thread, for the replicas of a `strategy.run` in it, and
    permanently for a `tf.function` that is traced inside.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 64)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
        ... )
        >>> with tfrs_embed.no_updates(), tf.GradientTape() as tape:
        ...     vectors = layer(tf.constant([3, 5]))
        >>> tape.gradient(vectors, layer.trainable_variables)
        [None]

    Yields:
        Nothing.
    """
    # Each thread has its own default graph, eagerly too. Replicas' threads
    # enter the graph of the thread that runs them.
    current = tf.compat.v1.get_default_graph()
    _constant[current] = _constant.get(current, 0) + 1
    try:
        yield
    finally:
        _constant[current] -= 1
        if not _constant[current]:
            del _constant[current]


@functools.cache
def install() -> None:
    """Makes each `tape.gradient` a `Pass` while it runs; idempotent."""
    gradient = tf.GradientTape.gradient

    # `wraps` lets AutoGraph take it for TensorFlow's.
    @functools.wraps(gradient)
    def noting(
        self: tf.GradientTape,
        target: Any,
        sources: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        this = Pass(self, sources)
        _thread.passes.append(this)
        read: Any = []
        try:
            nest = (sources, this.begin())
            gradients, read = gradient(self, target, nest, *args, **kwargs)
        except (AttributeError, ValueError) as error:
            this.explain(error)
            raise
        finally:
            _thread.passes.pop()
            this.end(read)
        return gradients

    tf.GradientTape.gradient = noting
