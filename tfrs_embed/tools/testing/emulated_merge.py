"""The merge call that joins the chips of an emulated slice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import (
    distribute_utils,
    mirrored_run,
    ops,
)


def merge(
    function: Callable[[Any, Sequence[Any]], list[Any]], call: Any
) -> Any:
    """Calls a function once with the calls of all chips.

    `function`, of the strategy and the calls, returns a result for each chip;
    this returns the result of this chip.
    """
    thread = threading.current_thread()
    graph = ops.get_default_graph()
    if (
        not isinstance(thread, mirrored_run._MirroredReplicaThread)
        or thread.graph is not graph
    ):
        raise RuntimeError(
            "Embedding tables are looked up and updated in the function that "
            "strategy.run runs, but not in a tf.function, tf.cond or "
            "tf.while_loop inside of it."
        )

    @tf.autograph.experimental.do_not_convert
    def merged(strategy: Any, calls: Any) -> Any:
        calls = strategy.experimental_local_results(calls)
        with strategy.extended.on_host():
            return distribute_utils.regroup(tuple(function(strategy, calls)))

    # Replicas share the graph's context, and take turns in merge calls: each
    # leaves the one that it found, and comes back to its own.
    context = graph._get_control_flow_context()
    graph._set_control_flow_context(context and context.outer_context)
    try:
        return tf.distribute.get_replica_context().merge_call(merged, (call,))
    finally:
        graph._set_control_flow_context(context)
