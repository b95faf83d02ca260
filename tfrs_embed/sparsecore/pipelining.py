"""Finds loops of training steps, which the TPU compiler pipelines.

In the body of a `tf.while_loop` a step's update is deferred until after the
next step's lookup, and the last update until after the loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from tfrs_embed.compat.private_tensorflow import (
    control_flow_v2_func_graphs,
    func_graph,
    function_context,
    ops,
)

_LOOPS = ("While", "StatelessWhile")
_numbers = itertools.count(1)


def in_loop() -> bool:
    """Whether operations are being built in the body of a `tf.while_loop`.

    AutoGraph's loops count, and functions and branches inside a body.
    """
    return _innermost_body() is not None


def directly_in_loop() -> bool:
    """Like `in_loop`, but False in functions and branches inside the body."""
    return isinstance(
        ops.get_default_graph(),
        control_flow_v2_func_graphs.WhileBodyFuncGraph,
    )


def around_loop(callback: Callable[[], None]) -> None:
    """Runs a callback before and after the innermost loop that is being traced.

    It runs in the graph around the loop, at once and right after the loop's
    operation is made; automatic control dependencies order operations on
    variables that the loop uses. The first run applies an update that a loop
    left when an error ended it.
    """
    body = _innermost_body()
    if body is None:
        raise RuntimeError("around_loop was called outside of a loop's body.")
    callbacks = getattr(body, "_tfrs_embed_at_end", None)
    if callbacks is None:
        callbacks = body._tfrs_embed_at_end = []
        _run_behind(body, callbacks)
    callbacks.append(callback)
    with body.outer_graph.as_default(), ops.control_dependencies(None):
        callback()


def retrace_in_loops() -> None:
    """Makes loops trace the functions that they call again; call this once.

    TensorFlow would reuse a `tf.function` that was traced outside of the loop,
    with updates that are not deferred, or never applied after the loop.
    """
    original = function_context.make_function_context
    if hasattr(original, "_tfrs_embed_original"):
        return

    def make_function_context(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        body = _innermost_body()
        if body is None:
            return made
        # The body's id() could be that of a later body.
        if not hasattr(body, "_tfrs_embed_number"):
            body._tfrs_embed_number = next(_numbers)
        return made._replace(context=(made.context, body._tfrs_embed_number))

    make_function_context._tfrs_embed_original = original  # type: ignore[attr-defined]
    function_context.make_function_context = make_function_context


def _innermost_body() -> Any:
    graph = ops.get_default_graph()
    while isinstance(graph, func_graph.FuncGraph):
        if isinstance(graph, control_flow_v2_func_graphs.WhileBodyFuncGraph):
            return graph
        graph = graph.outer_graph
    return None


def _run_behind(body: Any, callbacks: list[Callable[[], None]]) -> None:
    """Runs the callbacks after the loop with this body is made."""
    outer = body.outer_graph
    create = outer._create_op_internal

    def create_op(op_type: str, *args: Any, **kwargs: Any) -> Any:
        op = create(op_type, *args, **kwargs)
        if op_type in _LOOPS and op.get_attr("body").name == body.name:
            outer._create_op_internal = create
            for callback in callbacks:
                callback()
        return op

    outer._create_op_internal = create_op
