"""The gradients that programs take, and whether they ask for a table's."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import custom_gradients, kerases
from tfrs_embed.gradients.flag import (
    NOT_ASKED,
    UNSAID,
    UpdateFlag,
    handle,
    used,
)


class _Thread(threading.local):
    """The passes that a thread runs, the outermost first."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []


_thread = _Thread()

# The number of `no_updates` blocks in effect, by graph.
_constant: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

# By tape: its record, which `tape.reset` replaces, and the flags of functions
# whose gradients have updated tables.
_updated: weakref.WeakKeyDictionary[
    tf.GradientTape, tuple[Any, weakref.WeakSet[UpdateFlag]]
] = weakref.WeakKeyDictionary()


class Pass:
    """A call of `tape.gradient`, while it runs.

    Attributes:
        graph: the graph that the call is traced in; see `graph`.
        sources: the nest of sources, tensors and variables.
    """

    __slots__ = ("_places", "_scales", "_tape", "_values", "graph", "sources")

    def __init__(self, tape: tf.GradientTape, sources: Any) -> None:
        self.graph = graph()
        self._tape = tape
        self.sources = sources
        # The indices of sources by the ids of their handles.
        self._places: dict[int, int] | None = None
        # The `LossScaleOptimizer`s that scaled the loss.
        self._scales: list[Any] = []
        # The values of the flags that this pass has set.
        self._values: dict[UpdateFlag, Any] = {}

    def asks_for(self, variable: tf.Variable) -> bool:
        """Whether a variable is among the sources."""
        return self._place(variable) is not None

    def scale(self, optimizer: Any) -> None:
        """Notes that the loss was scaled, for the gradients that follow.

        Raises:
            ValueError: another optimizer has scaled the loss too, and a
                function's gradient is to update tables.
        """
        if not any(optimizer is known for known in self._scales):
            self._scales.append(optimizer)
        for flag, value in self._values.items():
            if value is not NOT_ASKED:
                self._assign(flag, self._scale_of(flag))

    def scaled_by(self, layer: str) -> Any:
        """The `LossScaleOptimizer` that scaled the loss, or None.

        Raises:
            ValueError: several did; the error names the layer.
        """
        if len(self._scales) > 1:
            raise ValueError(
                f"Layer '{layer}': losses that different LossScaleOptimizers "
                "scaled are differentiated together, so what the tables' "
                "gradients are scaled by can't be known. Take the gradient of "
                "each loss by itself."
            )
        return self._scales[0] if self._scales else None

    def register(self, flag: UpdateFlag) -> None:
        """Tells a flag that a function's gradient reads whether to update.

        Only if the tape has seen the flag's layer: another thread's pass may be
        about to read the flag, and a graph must not refer to other models.
        """
        if flag in self._values or not self._sees(flag.weight):
            return
        around = self._around()
        known, updated = _updated.get(self._tape, (None, ()))
        again = flag in updated and known is self._tape._tape
        asks = updates_allowed() and all(
            p.asks_for(flag.weight) for p in [*around, self]
        )
        if self.graph == "eager":
            where: Any = tf.init_scope()
        else:
            where = self.graph.as_default()
            # The graph calls a function that reads the layer's tables. The
            # gradient function must keep neither graph nor tables.
            custom_gradients.move_all(self.graph)
        # A function's gradient may be traced now.
        with where:
            if not asks or again:
                self._assign(flag, NOT_ASKED)
            else:
                value = _value(around, flag)
                scaled = self._scales or value is UNSAID
                self._assign(flag, self._scale_of(flag) if scaled else value)

    def end(self, gradients: Any) -> None:
        """Resets the flags that it set.

        Args:
            gradients: the sources' gradients; None if an error was raised.

        Raises:
            RuntimeError: an earlier pass of the tape has updated the tables.
        """
        flat = [] if gradients is None else tf.nest.flatten(gradients)
        around = self._around()
        duplicate = None
        for flag, value in self._values.items():
            place = self._place(flag.weight)
            found = flat[place] if flat and place is not None else None
            # TensorFlow may inline functions; then only their results are
            # computed after the flag is read.
            waits = [] if found is None else [tf.identity(found)]
            with tf.control_dependencies(waits):
                flag.variable().assign(_value(around, flag))
            if found is None or not updates_allowed():
                continue
            if value is not NOT_ASKED:
                self._note_update(flag)
            elif all(p.asks_for(flag.weight) for p in around):
                duplicate = flag
        if duplicate is not None:
            raise duplicate_update_error(duplicate.layer)

    def _around(self) -> list[Pass]:
        """The passes that call this one, as where a layer is recomputed."""
        return [p for p in here() if p is not self]

    def _note_update(self, flag: UpdateFlag) -> None:
        record = self._tape._tape
        if record is None:
            return  # The tape has no other pass.
        known, updated = _updated.get(self._tape, (None, None))
        if updated is None or known is not record:
            updated = weakref.WeakSet()
            _updated[self._tape] = record, updated
        updated.add(flag)

    def _sees(self, variable: tf.Variable) -> bool:
        """Whether the tape may have recorded a function that reads it."""
        here = handle(variable)
        return self.asks_for(variable) or any(
            handle(watched) is here
            for watched in self._tape.watched_variables()
        )

    def _place(self, variable: tf.Variable) -> int | None:
        if self._places is None:
            self._places = {
                id(handle(source)): place
                for place, source in enumerate(tf.nest.flatten(self.sources))
            }
        return self._places.get(id(handle(variable)))

    def _scale_of(self, flag: UpdateFlag) -> Any:
        optimizer = self.scaled_by(flag.layer)
        if optimizer is None:
            return 1.0
        return tf.cast(kerases.loss_scale(optimizer), tf.float32)

    def _assign(self, flag: UpdateFlag, value: Any) -> None:
        flag.variable().assign(value)
        self._values[flag] = value


def _value(passes: Sequence[Pass], flag: UpdateFlag) -> Any:
    """The value that the innermost of some passes gave a flag."""
    values = [p._values[flag] for p in passes if flag in p._values]
    return values[-1] if values else UNSAID


def read(flag: UpdateFlag) -> tf.Tensor:
    """The value of a flag when the function being traced will run."""
    flag.used = True
    for running in all_passes():
        running.register(flag)
    return tf.convert_to_tensor(flag.variable())


def duplicate_update_error(layer: str) -> RuntimeError:
    """Makes the error of a second update from one lookup."""
    return RuntimeError(
        f"Layer '{layer}': the gradient of one lookup is taken a second time, "
        "by a persistent tape, or by several. Its tables are updated in the "
        "backward pass, and would be twice. Ask for the layer's gradients "
        "once, of the sum of all losses; other gradients can be taken as often "
        "as wanted if the layer's variables are not among the sources. Of a "
        "layer that is called in a tf.function of its own a persistent tape "
        "takes one gradient, of any lookup. See docs/gradients.md."
    )


def graph() -> Any:
    """Returns the graph being traced; a constant when executing eagerly."""
    if tf.executing_eagerly():
        return "eager"
    return tf.compat.v1.get_default_graph()


def here() -> list[Pass]:
    """The passes that run in the current graph, the outermost first."""
    current = graph()
    return [p for p in _thread.passes if p.graph is current]


def all_passes() -> list[Pass]:
    """The passes that this thread runs, the outermost first."""
    return list(_thread.passes)


def updates_allowed() -> bool:
    """Whether no block of `no_updates` is in effect."""
    if not _constant:
        return True
    current = tf.compat.v1.get_default_graph()
    while current is not None:
        if current in _constant:
            return False
        current = getattr(current, "outer_graph", None)
    return True


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
        gradients = None
        try:
            for flag in used():
                this.register(flag)
            gradients = gradient(self, target, sources, *args, **kwargs)
        finally:
            _thread.passes.pop()
            if this._values:
                this.end(gradients)
        return gradients

    tf.GradientTape.gradient = noting
