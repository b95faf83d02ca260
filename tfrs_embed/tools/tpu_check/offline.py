"""A real TPUStrategy without TPUs, under which programs are only traced.

TensorFlow's TPUStrategy asks its resolver for the devices' names and needs no
device to trace a program. Variables are on the CPU; large ones get no memory.
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
from tfrs_embed.tools.tpu_check.slices import Slice

#: Of variables that get no memory, in bytes; others are initialized as usual.
_LARGE = 1 << 20
_HOST = "/job:localhost/replica:0/task:0/device:"


class OfflineResolver(tpu_cluster_resolver.TPUClusterResolver):
    """Names the TPUs of a slice, all of one host, without looking for them.

    Args:
        tpu_slice: the slice.
    """

    #: Marks that there are no devices to run a program on.
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
        """The topology that TPUExtended makes a `HardwareFeature` of."""
        return topology_pb2.TPUHardwareFeature(
            embedding_feature=self.tpu_slice.embedding_feature.value,
            num_embedding_devices_per_chip=self.tpu_slice.sparse_cores,
        )

    def master(self, *_: Any, **__: Any) -> str:
        """The address of TensorFlow's own process."""
        return ""

    def get_master(self) -> str:
        """See `master`."""
        return ""

    def cluster_spec(self) -> Any:
        """None: there is no cluster."""
        return None

    def get_tpu_system_metadata(self) -> Any:
        """The devices' names."""
        return self._metadata


def tpu_devices(tpu_slice: Slice) -> list[str]:
    """The full names of a slice's TPU devices, one for each replica."""
    return [f"{_HOST}TPU:{i}" for i in range(tpu_slice.replicas)]


def devices(tpu_slice: Slice) -> list[str]:
    """The full names of all devices that the runtime would have."""
    return [f"{_HOST}CPU:0", f"{_HOST}TPU_SYSTEM:0", *tpu_devices(tpu_slice)]


@contextlib.contextmanager
def offline(tpu_slice: Slice) -> Iterator[OfflineResolver]:
    """Gives programs that connect to TPUs a slice that does not exist.

    Within it `TPUClusterResolver(...)` gives the slice's resolver, connecting
    and initializing do nothing, and variables of 1 MiB or more whose value an
    initializer computes have a shape but no memory.

    Args:
        tpu_slice: the slice.

    Yields:
        Its resolver.
    """
    resolver = OfflineResolver(tpu_slice)

    class Connected(OfflineResolver):
        """Takes what a TPUClusterResolver takes, and is the slice's."""

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
        # The embedding cores of older TPUs, which are loaded as tables are
        # made and unloaded as they are read.
        (tpu_embedding_v2, "_load_variables_impl", _nothing),
        (tpu_embedding_v2, "_retrieve_variables_impl", _nothing),
        (
            tpu_embedding_v2.tpu,
            "initialize_system_for_tpu_embedding",
            _nothing,
        ),
        (
            tpu_embedding_v2.tpu_ops,
            "is_tpu_embedding_initialized",
            lambda *_: False,
        ),
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
    """Makes large variables without memory."""
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
    """The spec of an initializer's value, if known without running it."""
    if not callable(initial_value):
        return None
    try:
        graph = func_graph.func_graph_from_py_func(
            "initial_value", initial_value, (), {}
        )
        [output] = graph.outputs
    except Exception:
        # It will be run, and raise its own error.
        return None
    return tf.TensorSpec(output.shape, dtype or output.dtype)
