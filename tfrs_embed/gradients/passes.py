"""The gradients that programs take, and whether they ask for a table's."""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


class _Thread(threading.local):
    """The passes that a thread runs, the outermost first."""

    def __init__(self) -> None:
        self.passes: list[Pass] = []


_thread = _Thread()

# The number of `no_updates` blocks in effect, by graph.
_constant: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


class Pass:
    """A call of `tape.gradient`, while it runs.

    Attributes:
        graph: the graph that the call is traced in; see `graph`.
        sources: the nest of sources, tensors and variables.
        scaled_by: the `LossScaleOptimizer`s that scaled the loss.
    """

    __slots__ = ("_handles", "graph", "scaled_by", "sources")

    def __init__(self, sources: Any) -> None:
        self.graph = graph()
        self.sources = sources
        self.scaled_by: list[Any] = []
        # The ids of the sources' handles.
        self._handles: set[int] | None = None

    def asks_for(self, variable: tf.Variable) -> bool:
        """Whether a variable is among the sources."""
        if self._handles is None:
            sources = tf.nest.flatten(self.sources)
            self._handles = {id(_handle(source)) for source in sources}
        return id(_handle(variable)) in self._handles


def _handle(value: object) -> object:
    """A variable's handle on this device, or the value itself."""
    try:
        return getattr(value, "handle", value)
    except ValueError:
        # A mirrored variable has no handle outside of replicas.
        return value


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
        _thread.passes.append(Pass(sources))
        try:
            return gradient(self, target, sources, *args, **kwargs)
        finally:
            _thread.passes.pop()

    tf.GradientTape.gradient = noting
