"""Graphs, the functions they call, and tensors of outer graphs."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

#: Options of a `tf.function` that is not copied into the graphs that call it:
#: TensorFlow optimizes each copy, which may take seconds.
NOT_INLINED = {"experimental_attributes": {"_noinline": True}}


class TracedOnce:
    """A function in a graph of its own, traced in its first call.

    TensorFlow warns of a `tf.function` made in each call, and mistakes
    functions of the same code, one for each table, for one.

    Args:
        function: takes tensors.
        *signature: their specs.
        **options: options of `tf.function`.
    """

    def __init__(
        self, function: Callable[..., Any], *signature: Any, **options: Any
    ) -> None:
        self._function = function
        self._signature = signature
        self._options = options
        self._concrete: Any = None

    def __call__(self, *tensors: tf.Tensor) -> Any:
        if self._concrete is None:
            self._concrete = tf.function(
                self._function, autograph=False, **self._options
            ).get_concrete_function(*self._signature)
        return self._concrete(*tensors)


def variables_at_once() -> AbstractContextManager[None]:
    """Initializes variables made inside at once; for use in an init_scope.

    Otherwise a variable made while tracing waits for the function's
    initializers, and TensorFlow traces the function again.
    """

    def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
        kwargs["experimental_enable_variable_lifting"] = False
        return next_creator(**kwargs)

    made: AbstractContextManager[None] = tf.variable_creator_scope(create)
    return made


def traced() -> Iterator[Any]:
    """Yields the graph being traced, and the graphs around it.

    Eagerly it is the thread's default graph.
    """
    graph: Any = tf.compat.v1.get_default_graph()
    while graph is not None:
        yield graph
        graph = getattr(graph, "outer_graph", None)


def operations(graph: Any) -> Iterator[tf.Operation]:
    """Yields the operations of a graph, and of the functions it calls."""
    yield from with_called(graph.get_operations())


def with_called(roots: Iterable[tf.Operation]) -> Iterator[tf.Operation]:
    """Yields operations, and once each of the functions they call."""
    seen = set()
    pending = collections.deque(roots)
    while pending:
        op = pending.popleft()
        yield op
        for name in _names(op):
            inner = op.graph._get_function(name)
            if inner is not None and name not in seen:
                seen.add(name)
                pending.extend(inner.graph.get_operations())


def capture(tensors: Iterable[tf.Tensor]) -> list[tf.Tensor]:
    """Returns tensors as captured by the graph that is being traced.

    A function may use tensors of outer graphs directly, but TensorFlow then
    calls it only where these tensors exist; a SavedModel hasn't got them.
    """
    if tf.executing_eagerly():
        return list(tensors)
    graph = tf.compat.v1.get_default_graph()
    return [t if t.graph is graph else graph.capture(t) for t in tensors]


def _names(op: tf.Operation) -> Iterator[str]:
    for attribute in op.node_def.attr.values():
        for function in (attribute.func, *attribute.list.func):
            if function.name:
                yield function.name
