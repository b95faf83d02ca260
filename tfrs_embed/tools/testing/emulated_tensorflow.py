"""The functions of TensorFlow that an EmulatedTPUStrategy replaces.

A replacement checks at each call whether an emulated strategy is in effect, and
calls TensorFlow's own function if not.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import (
    gen_xla_ops,
    tpu_embedding_v3,
    tpu_replication,
    tpu_strategy,
    tpu_util,
    values_util,
)
from tfrs_embed.sparsecore import pipelining
from tfrs_embed.sparsecore.host_kernels import has_kernels
from tfrs_embed.sparsecore.mid_level.tpu_embedding_v2 import TPUEmbeddingV2
from tfrs_embed.tools.testing import emulated_device_ops, emulated_host

_Function = Callable[..., Any]


#: `embedding` is the TPUEmbeddingV2 whose method this thread is running.
_current = threading.local()


@functools.cache
def install() -> None:
    """Replaces TensorFlow's functions, once."""
    # TensorFlow's would warn at each call that no TPU program is built.
    _replace("outside_compilation", _call, module=tpu_replication)
    enclosing = tpu_util.enclosing_tpu_context
    tpu_util.enclosing_tpu_context = lambda: enclosing() or _replica()
    pipelining.retrace_in_loops()
    for name, emulated in emulated_device_ops.COPIES.items():
        _replace(name, emulated)
    for name, emulated in emulated_device_ops.LOOKUPS.items():
        _replace(name, emulated, _looks_up)
    for name, update in emulated_device_ops.UPDATES.items():
        _replace(name, functools.partial(_update, update))
    cls = tpu_embedding_v3.TPUEmbeddingV2
    _replace("enqueue", functools.partial(_enqueue, cls.enqueue), module=cls)
    for name in ("enqueue", "dequeue", "apply_gradients"):
        setattr(cls, name, _remembered(getattr(cls, name)))
    if not has_kernels():
        _replace("_preprocess_features", emulated_host.preprocess, module=cls)
        name = "compute_sparse_core_stats"
        _replace(name, getattr(TPUEmbeddingV2, name), module=cls)
        setattr(cls, name, staticmethod(getattr(cls, name)))
    _replace_shards(tpu_embedding_v3.TPUEmbeddingShardedVariable)


def _emulated(strategy: Any) -> bool:
    # The module of EmulatedTPUStrategy imports this one.
    return isinstance(strategy, tpu_strategy.TPUStrategyV2) and hasattr(
        strategy, "topology"
    )


def _in_effect() -> bool:
    """Whether an emulated strategy is in effect."""
    embedding = getattr(_current, "embedding", None)
    if embedding is not None:
        return _emulated(embedding._strategy)
    return _emulated(tf.distribute.get_strategy())


def _looks_up() -> bool:
    """Whether an emulated strategy is in effect and lookups are computed.

    Keras builds a model's graph outside of replicas, only for its shapes.
    """
    if _replica() is None and not tf.executing_eagerly():
        return False
    return _in_effect()


def _replace(
    name: str,
    emulated: _Function,
    when: Callable[[], bool] = _in_effect,
    module: Any = gen_xla_ops,
) -> None:
    """Replaces a function, by default an op's."""
    original = getattr(module, name)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return (emulated if when() else original)(*args, **kwargs)

    setattr(module, name, replacement)


def _call(function: _Function, *args: Any, **kwargs: Any) -> Any:
    extended = tf.distribute.get_strategy().extended
    # An embedding may be called outside of any strategy.
    with getattr(extended, "on_host", contextlib.nullcontext)():
        return function(*args, **kwargs)


def _enqueue(
    enqueue: _Function,
    embedding: Any,
    features: Any,
    weights: Any = None,
    device: str | None = None,
) -> Any:
    # TensorFlow refuses devices that aren't TPUs, as the chips are here.
    if device in embedding._strategy.extended.worker_devices:
        device = None
    return _call(enqueue, embedding, features, weights, device)


def _update(update: _Function, **kwargs: Any) -> Any:
    return update(_current.embedding, **kwargs)


def _remembered(method: _Function) -> _Function:
    @functools.wraps(method)
    def remembered(embedding: Any, *args: Any, **kwargs: Any) -> Any:
        before = getattr(_current, "embedding", None)
        _current.embedding = embedding
        try:
            return method(embedding, *args, **kwargs)
        finally:
            _current.embedding = before

    return remembered


def _replica() -> Any:
    """The part of a TPU replica's context that variables use.

    None outside of an emulated replica.
    """
    context = tf.distribute.get_replica_context()
    if context is None or not _emulated(context.strategy):
        return None
    replica = values_util.get_current_replica_id_as_int()
    return types.SimpleNamespace(
        get_replicated_var_handle=lambda name, handle_id, values, *_: (
            values[replica].handle
        )
    )


def _replace_shards(cls: Any) -> None:
    """Reads and assigns a table's shards on CPUs, as logical CPUs' variables.

    TensorFlow uses a packed handle, which only TPUs have.
    """

    def replaced(original: _Function, use: _Function) -> _Function:
        @functools.wraps(original)
        def on_device(variable: Any, device: str, *args: Any) -> Any:
            strategy = variable.distribute_strategy
            if not _emulated(strategy):
                return original(variable, device, *args)
            chip = strategy.extended.worker_devices.index(device)
            return use(variable.values[chip], *args)

        return on_device

    cls.read_from_device = replaced(
        cls.read_from_device, lambda shard: shard.read_value()
    )
    cls.assign_on_device = replaced(
        cls.assign_on_device, lambda shard, value: shard.assign(value)
    )
