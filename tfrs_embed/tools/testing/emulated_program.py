"""The rules for a TPU's program: operations, and reductions over replicas.

TensorFlow's registries have them: the dtypes of CrossReplicaSum, and XLA's
kernels. TPUs have kernels for the same operations as CPUs; those that only TPUs
have are never used on an emulated slice. The kernels' dtypes are not checked.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.graphs import with_called
from tfrs_embed.compat.private_tensorflow import (
    kernel_registry,
    op_def_registry,
)

_COMPILED_FOR = "XLA_CPU_JIT"
# TensorFlow's bridge leaves them to the host, although XLA has kernels.
_LEFT_TO_HOSTS = frozenset({"Bincount", "DenseBincount"})


class ProgramReplicas:
    """The operations that the replicas of one call of strategy.run build."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self._first = _next_id(graph)
        self._others: list[tuple[int, int]] = []

    def has(self, op: tf.Operation) -> bool:
        """Whether an operation would run on a TPU, not on the host."""
        number = op._id
        return (
            op.graph is self.graph
            and number >= self._first
            and not any(first <= number < end for first, end in self._others)
        )

    @contextlib.contextmanager
    def without(self) -> Iterator[None]:
        """Leaves out operations built within: a TPU does not run them."""
        first = _next_id(self.graph)
        yield
        self._others.append((first, _next_id(self.graph)))

    def check_kernels(self) -> None:
        """Raises an error if TPUs have no kernel for a replicas' operation.

        After tf.config.set_soft_device_placement(True), which a function that
        is traced has off by default, the host runs such operations.
        """
        if tf.config.get_soft_device_placement():
            return
        mine = filter(self.has, self.graph.get_operations())
        found = [
            f"{op.type} '{op.name}'"
            for op in with_called(mine)
            if op.type != "Placeholder" and op.type not in _kernels()
        ]
        if found:
            raise tf.errors.InvalidArgumentError(
                None,
                None,
                f"No TPU has a kernel for {', '.join(found)}. With "
                "tf.config.set_soft_device_placement(True) the host runs it.",
            )


def require_reducible(reduce_op: Any, values: Any) -> None:
    """Raises a TypeError if TPUs can't reduce nested values over replicas."""
    for value in tf.nest.flatten(values):
        if isinstance(value, tf.distribute.DistributedValues):
            value = value.values[0]
        if isinstance(value, tf.IndexedSlices):
            value = value.values
        dtype = getattr(value, "dtype", None)
        if dtype is not None and dtype.base_dtype not in _summable():
            raise TypeError(
                f"TPUs can't sum {dtype.name} over replicas, only "
                f"{', '.join(sorted(d.name for d in _summable()))}: cast it."
            )
        mean = reduce_op == tf.distribute.ReduceOp.MEAN
        if mean and dtype is not None and not dtype.is_floating:
            raise TypeError(
                f"TPUs can't average {dtype.name} over replicas: they multiply "
                "by a fraction. Cast it to float32."
            )


@functools.cache
def _summable() -> frozenset[tf.DType]:
    [attribute] = op_def_registry.get("CrossReplicaSum").attr
    return frozenset(map(tf.as_dtype, attribute.allowed_values.list.type))


def _next_id(graph: Any) -> int:
    return int(graph.version) + 2


@functools.cache
def _kernels() -> frozenset[str]:
    """The operations that TPUs run."""
    # The first compilation registers them, even a failed one: TensorFlow's
    # wheel for TPUs has no compiler for the host.
    with contextlib.suppress(tf.errors.NotFoundError), tf.init_scope():
        tf.function(lambda: tf.constant(0) + 1, jit_compile=True)()
    found = {
        kernel.op
        for kernel in kernel_registry.get_all_registered_kernels().kernel
        if kernel.device_type == _COMPILED_FOR
    }
    assert found, "TensorFlow has registered no kernels of XLA's"
    return frozenset(found) - _LEFT_TO_HOSTS
