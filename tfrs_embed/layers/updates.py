"""Updates in a graph, of which unused ones are left out.

A layer's update of its tables is a part of the graph that stands beside the
gradient of one scalar weight: nothing follows from it. It is to be made where
that gradient is used. Whether it is shows only when the whole graph is traced,
so the update is built at once, and left out of the function if the gradient
went nowhere.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfrs_embed import backward_passes

# The attribute of a graph that holds its updates.
_ATTRIBUTE = "_tfrs_embed_updates"


@dataclasses.dataclass
class Update:
    """The operations that update a layer's tables.

    Attributes:
        lookup: whose gradient it is, an object for each.
        layer: the layer's name, for errors.
        first: the place of the first of its operations in the graph.
        end: the place after the last one.
        signal: the scalar weight's gradient.
    """

    lookup: Any
    layer: str
    first: int
    end: int = 0
    signal: tf.Tensor | None = None


@contextlib.contextmanager
def recording(lookup: Any, layer: str) -> Iterator[Update]:
    """Notes that what is built inside, in the current graph, is an update.

    Args:
        lookup: whose gradient it is, an object for each.
        layer: the layer's name, for errors.

    Yields:
        The update, which wants to be given its signal.
    """
    graph = tf.compat.v1.get_default_graph()
    update = Update(lookup, layer, len(_operations(graph)))
    yield update
    update.end = len(_operations(graph))
    if not hasattr(graph, _ATTRIBUTE):
        setattr(graph, _ATTRIBUTE, [])
        of_graph = weakref.ref(graph)
        before = graph.get_operations
        # What TensorFlow makes a function of, and orders before.
        graph.get_operations = lambda: _remaining(of_graph(), before())
    getattr(graph, _ATTRIBUTE).append(update)


def _operations(graph: Any) -> list[tf.Operation]:
    """All of a graph's operations, in the order they were made in."""
    return type(graph).get_operations(graph)


def _remaining(
    graph: Any, operations: list[tf.Operation]
) -> list[tf.Operation]:
    """A graph's operations without those of updates that nobody asks for.

    Raises:
        RuntimeError: two updates of one lookup are asked for.
    """
    outputs = {id(t) for t in getattr(graph, "outputs", ())}
    left_out: set[tf.Operation] = set()
    made: set[int] = set()
    for update in getattr(graph, _ATTRIBUTE):
        assert update.signal is not None
        own = operations[update.first : update.end]
        uses = _uses(update.signal)
        waits = set(update.signal.op._control_outputs).difference(own)
        if waits or any(_keeps(op, outputs) for op in uses):
            if id(update.lookup) in made:
                raise backward_passes.too_often(update.layer)
            made.add(id(update.lookup))
        else:
            left_out.update(own, uses)
    # What has a use elsewhere stays.
    for op in reversed(operations):
        if op in left_out and any(
            user not in left_out
            for user in [
                *(c for output in op.outputs for c in output.consumers()),
                *op._control_outputs,
            ]
        ):
            left_out.remove(op)
    return [op for op in operations if op not in left_out]


def _uses(signal: tf.Tensor) -> set[tf.Operation]:
    """The operations that need a tensor, also by way of others."""
    found: set[tf.Operation] = set()
    waiting = list(signal.consumers())
    while waiting:
        op = waiting.pop()
        if op not in found:
            found.add(op)
            waiting += [c for output in op.outputs for c in output.consumers()]
    return found


def _keeps(op: tf.Operation, outputs: set[int]) -> bool:
    """Whether what an operation needs is needed."""
    if op._is_stateful or op._control_outputs:
        return True
    # What a function returns goes through an identity that nothing follows.
    returned = op.type.startswith("Identity") and not any(
        output.consumers() for output in op.outputs
    )
    return returned or any(id(output) in outputs for output in op.outputs)
