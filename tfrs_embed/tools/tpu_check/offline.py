"""A real TPUStrategy without TPUs, for tracing programs.

TensorFlow's TPUStrategy asks its resolver for the devices' names, and traces a
program without any device. Variables are on the CPU; large ones get no memory.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import (
    UninitializedVariable,
    client_session,
    func_graph,
    topology_pb2,
    tpu_cluster_resolver,
    tpu_embedding_v2,
    tpu_system_metadata,
)
from tfrs_embed.sparsecore.slices import Slice

#: Variables of at least so many bytes get no memory.
_LARGE = 1 << 20
_HOST = "/job:localhost/replica:0/task:0/device:"


class OfflineResolver(tpu_cluster_resolver.TPUClusterResolver):
    """Names the TPUs of a slice, all on one host; none of them has to exist."""

    #: Read by `strategies.is_offline`: there are no devices to run programs.
    offline = True
    environment = ""
    task_type = None
    task_id = None

    def __init__(self, tpu_slice: Slice) -> None:
        self.tpu_slice = tpu_slice
        names = tpu_devices(tpu_slice)
        self._metadata = tpu_system_metadata.TPUSystemMetadata(
            num_cores=len(names),
            num_hosts=1,
            num_of_cores_per_host=len(names),
            topology=None,
            devices=[
                client_session._DeviceAttributes(name, "TPU", 1 << 30, 0)
                for name in names
            ],
        )

    @property
    def tpu_hardware_feature(self) -> Any:
        return topology_pb2.TPUHardwareFeature(
            embedding_feature=self.tpu_slice.embedding_feature.value,
            num_embedding_devices_per_chip=self.tpu_slice.sparse_cores,
        )

    def master(self, *_: Any, **__: Any) -> str:
        return ""  # TensorFlow's own process.

    get_master = master

    def cluster_spec(self) -> tf.train.ClusterSpec:
        return tf.train.ClusterSpec({})  # As of "local" TPUs.

    def get_tpu_system_metadata(self) -> Any:
        return self._metadata


def tpu_devices(tpu_slice: Slice) -> list[str]:
    """The full names of a slice's TPU devices, one per replica."""
    return [f"{_HOST}TPU:{i}" for i in range(tpu_slice.replicas)]


def devices(tpu_slice: Slice) -> list[str]:
    """The full names of all devices of the runtime on the slice."""
    return [f"{_HOST}CPU:0", f"{_HOST}TPU_SYSTEM:0", *tpu_devices(tpu_slice)]


@contextlib.contextmanager
def offline(tpu_slice: Slice) -> Iterator[OfflineResolver]:
    """Connects programs to the TPUs of a slice that does not exist.

    Within, `TPUClusterResolver(...)` returns the slice's resolver, connecting
    and initializing do nothing, and variables of 1 MiB or more that a callable
    initializes have a shape but no memory.
    """
    resolver = OfflineResolver(tpu_slice)

    class Connected(OfflineResolver):
        """Accepts a TPUClusterResolver's arguments, returns `resolver`."""

        def __new__(cls, *_: Any, **__: Any) -> Any:
            return resolver

        @staticmethod
        def connect(*_: Any, **__: Any) -> OfflineResolver:
            return resolver

    replaced: list[tuple[Any, str, Any]] = [
        (tf.distribute.cluster_resolver, "TPUClusterResolver", Connected),
        (tf.config, "experimental_connect_to_cluster", _nothing),
        (tf.config, "experimental_connect_to_host", _nothing),
        (tf.tpu.experimental, "initialize_tpu_system", _nothing),
        (tf.tpu.experimental, "shutdown_tpu_system", _nothing),
        (tpu_cluster_resolver, "TPUClusterResolver", Connected),
        # Tables are copied to embedding cores when they are made, and back
        # when they are read.
        (tpu_embedding_v2, "_load_variables_impl", _nothing),
        (tpu_embedding_v2, "_retrieve_variables_impl", _nothing),
        (tpu_embedding_v2.tpu, "initialize_system_for_tpu_embedding", _nothing),
        (tpu_embedding_v2.tpu_ops, "is_tpu_embedding_initialized", _nothing),
    ]
    with contextlib.ExitStack() as stack:
        for module, name, value in replaced:
            stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(tf.variable_creator_scope(_without_memory))
        yield resolver


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _without_memory(
    next_creator: Callable[..., tf.Variable], **kwargs: Any
) -> tf.Variable:
    """A variable creator; large variables get no memory."""
    spec = _spec(kwargs.get("initial_value"), kwargs.get("dtype"))
    if spec is None or not spec.shape.is_fully_defined():
        return next_creator(**kwargs)
    if math.prod(spec.shape) * spec.dtype.size < _LARGE:
        return next_creator(**kwargs)
    return UninitializedVariable(
        trainable=kwargs.get("trainable"),
        name=kwargs.get("name"),
        shape=spec.shape,
        dtype=spec.dtype,
        synchronization=kwargs.get("synchronization"),
        aggregation=kwargs.get("aggregation"),
    )


def _spec(initial_value: Any, dtype: Any) -> tf.TensorSpec | None:
    """The spec of an initializer's value, if tracing the initializer tells."""
    if not callable(initial_value):
        return None
    try:
        graph = func_graph.func_graph_from_py_func(
            "initial_value", initial_value, (), {}
        )
        [output] = graph.outputs
    except Exception:
        return None  # Running the initializer will raise the error.
    return tf.TensorSpec(output.shape, dtype or output.dtype)
