"""Distribution strategies, their replicas, and XLA's and TPUs' programs."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import graphs
from tfrs_embed.compat.private_tensorflow import (
    control_flow_util,
    tpu_replication,
)


def check(name: str, strategy: tf.distribute.Strategy) -> None:
    """Raises a RuntimeError under another strategy than a layer's own."""
    if not tf.distribute.has_strategy():
        return
    current = tf.distribute.get_strategy()
    if current is not strategy:
        raise RuntimeError(
            f"Layer '{name}' was made under {type(strategy).__name__} but is "
            f"called under {type(current).__name__}. Make it inside the scope "
            "of the strategy that runs it."
        )


def scope(strategy: tf.distribute.Strategy) -> AbstractContextManager:
    """Returns the strategy's scope, for making variables."""
    # A replica that builds a layer can't enter the scope again.
    inside = tf.distribute.get_strategy() is strategy
    return nullcontext() if inside else strategy.scope()


def in_replica(strategy: tf.distribute.Strategy) -> bool:
    """Whether this code runs in a replica of the strategy."""
    return (
        tf.distribute.get_strategy() is strategy
        and not tf.distribute.in_cross_replica_context()
    )


def on_host(function: Callable[..., Any], *args: Any) -> Any:
    """Calls a function, in a TPU's replica on its host."""
    if tf.executing_eagerly() or tf.distribute.in_cross_replica_context():
        return function(*args)
    if not is_tpu(tf.distribute.get_strategy()):
        return function(*args)

    def with_shapes(*args: Any) -> Any:
        # The TPU's program needs the host's shapes, which its compiler can't
        # infer through a branch.
        return tf.nest.map_structure(
            lambda x: tf.ensure_shape(x, x.shape) if tf.is_tensor(x) else x,
            function(*args),
            expand_composites=True,
        )

    return tpu_replication.outside_compilation(with_shapes, *args)


def is_tpu(strategy: tf.distribute.Strategy) -> bool:
    """Whether a strategy is a TPUStrategy."""
    return isinstance(
        strategy,
        (tf.distribute.TPUStrategy, tf.distribute.experimental.TPUStrategy),
    )


def in_tpu_replica() -> bool:
    """Whether this code is part of a TPU's program."""
    return not tf.distribute.in_cross_replica_context() and is_tpu(
        tf.distribute.get_strategy()
    )


def on_tpu(op: tf.Operation) -> bool:
    """Whether an operation is part of a program that a TPU runs.

    A TPUStrategy's replica makes such operations, except for the host.
    """
    extended = tf.distribute.get_strategy().extended
    emulated = getattr(extended, "on_tpu", None)
    if emulated is not None:
        return bool(emulated(op))
    attributes = op.node_def.attr
    return (
        "_tpu_replicate" in attributes
        and "_xla_outside_compilation" not in attributes
    )


class NoValuesError(RuntimeError):
    """A table was read that has only a shape."""


def is_offline(strategy: tf.distribute.Strategy) -> bool:
    """Whether a TPUStrategy has no TPUs; see `tfrs_embed.tpu_check`."""
    resolver = getattr(strategy.extended, "_tpu_cluster_resolver", None)
    return getattr(resolver, "offline", False)


def in_xla() -> bool:
    """Whether XLA will compile the function being traced, not for TPUs."""
    if tf.executing_eagerly() or is_tpu(tf.distribute.get_strategy()):
        return False
    return control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )


def refuse_in_xla(what: str) -> None:
    """Raises a NotImplementedError in a function that XLA compiles.

    Programs of TPUs are allowed. `what` is a plural.
    """
    if in_xla():
        raise NotImplementedError(
            f"{what} are not supported inside tf.function(jit_compile=True). "
            "Leave jit_compile out, or call this layer outside of it."
        )


def in_pfor() -> bool:
    """Whether this is tracing inside `tf.vectorized_map` or a Jacobian.

    Only the name scope of their loops shows it.
    """
    return not tf.executing_eagerly() and any(
        _PFOR.search(graph.get_name_scope()) for graph in graphs.traced()
    )


_PFOR = re.compile(r"(^|/)loop_body(_\d+)?(/|$)")


NO_SPARSE_CORES = "SparseCores need TensorFlow 2.17 or newer"


def has_sparse_core_api() -> bool:
    """Whether this TensorFlow can lay tables out on SparseCores.

    TensorFlow 2.16 stacks tables in its class for TPUs, has other operations
    for the chips, and no SparseCoreEmbeddingConfig.
    """
    return hasattr(tf.tpu.experimental.embedding, "SparseCoreEmbeddingConfig")


def require_sparse_core_api() -> None:
    """Raises a RuntimeError unless `has_sparse_core_api`."""
    if not has_sparse_core_api():
        raise RuntimeError(
            f"{NO_SPARSE_CORES}, which has "
            "tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig; this is "
            f"TensorFlow {tf.__version__}. TPUs with embedding cores, GPUs and "
            "CPUs do without it."
        )
