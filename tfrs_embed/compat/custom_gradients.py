"""Custom gradients that end with their graph.

TensorFlow's registry keeps a graph's custom gradients forever. Their functions
refer to the graph's tensors, so the graph, its layer and tables would stay too.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import EagerTensor, ops

# The attribute of a graph with its gradients by name.
_ATTRIBUTE = "_tfrs_embed_gradients"


def custom_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """Is `tf.custom_gradient` with gradients that end with their graph."""
    plain = tf.custom_gradient(function)

    def with_gradient(*args: Any) -> Any:
        result = plain(*args)
        first = tf.nest.flatten(result, expand_composites=True)[0]
        if not isinstance(first, EagerTensor):
            move_all(first.graph)
            _move(first.op)
        return result

    return with_gradient


def move_all(graph: Any) -> None:
    """Makes gradients that others add to a graph, while tracing, end with it.

    Keras's optimizers add some in sums over replicas.
    """
    if hasattr(graph, _ATTRIBUTE):
        return
    setattr(graph, _ATTRIBUTE, {})
    of_graph = weakref.ref(graph)
    kind = type(graph)

    def operations() -> list[tf.Operation]:
        found = kind.get_operations(of_graph())
        for op in found:
            if op.type == "IdentityN":
                _move(op)
        return found

    # TensorFlow calls it at the end of tracing.
    graph.get_operations = operations


def _move(op: tf.Operation) -> None:
    """Moves an operation's gradient from the registry to its graph."""
    try:
        name = op.get_attr("_gradient_op_type").decode()
    except ValueError:
        return  # It has no gradient of its own.
    graph = op.graph
    of_its_own = getattr(graph, _ATTRIBUTE)
    entries = ops.gradient_registry._registry
    # Other names were registered to stay.
    if not name.startswith("CustomGradient-") or name in of_its_own:
        return
    entry = entries.get(name)
    if entry is None or getattr(entry["type"], "is_weak", False):
        return  # Of another graph, which this one is made of.
    of_its_own[name] = entry["type"]
    of_graph = weakref.ref(graph)

    def gradient(op: tf.Operation, *gradients: Any) -> Any:
        graph = of_graph()
        if graph is None:
            raise RuntimeError(
                "The function that this gradient belongs to is gone."
            )
        return getattr(graph, _ATTRIBUTE)[name](op, *gradients)

    gradient.is_weak = True  # type: ignore[attr-defined]
    entry["type"] = gradient
    weakref.finalize(graph, entries.pop, name, None)
