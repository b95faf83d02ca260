"""Loops over training steps, where the TPU compiler pipelines embeddings.

In the body of a `tf.while_loop` a step's table update is deferred until the
next step has looked its rows up, and the last one until the loop has ended. So
whoever builds a step must know that it is in such a loop, and must be able to
add operations behind the loop.
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
    """Whether operations are being built in the body of a loop.

    Returns:
        True in the body of a `tf.while_loop`, or of a Python loop over a tensor
        that became one, in a `tf.function`; also in functions and branches
        inside of it.
    """
    return _innermost_body() is not None


def directly_in_loop() -> bool:
    """Whether operations are being built in a loop's body itself.

    Returns:
        What `in_loop` does, but False in functions and branches inside.
    """
    return isinstance(
        ops.get_default_graph(),
        control_flow_v2_func_graphs.WhileBodyFuncGraph,
    )


def around_loop(callback: Callable[[], None]) -> None:
    """Runs a callback before and behind the loop whose body is being built.

    The innermost loop counts. The callback runs twice in the graph around the
    loop: now, before the loop's operation is made, and as soon as it is made.
    Automatic control dependencies order what it builds: operations on variables
    that the loop uses run before and after the loop. An update that a loop left
    when an error ended it is applied before the next loop.

    Args:
        callback: builds the operations.

    Raises:
        RuntimeError: no body of a loop is being built.
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
    """Makes each loop trace the functions that it calls anew.

    TensorFlow would reuse a `tf.function` that was traced outside of the loop.
    Its updates would not be deferred, or would be deferred with nothing behind
    the loop to apply them. Call this once, before such functions are traced.
    """
    original = function_context.make_function_context
    if hasattr(original, "_tfrs_embed_original"):
        return

    def make_function_context(*args: Any, **kwargs: Any) -> Any:
        made = original(*args, **kwargs)
        body = _innermost_body()
        if body is None:
            return made
        # Not by the body's id, which a later body may have.
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
    """Runs the callbacks when the loop with this body is made."""
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
