"""A TPUStrategy that needs no TPU."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import (
    ag_ctx,
    autograph,
    cross_device_ops,
    def_function,
    device_util,
    distribute_utils,
    embedding_pipelining_state,
    mirrored_strategy,
    topology_pb2,
    tpu_hardware_feature,
    tpu_strategy,
)
from tfrs_embed.compat.strategies import require_sparse_core_api
from tfrs_embed.sparsecore.topology import Topology
from tfrs_embed.tools.testing import emulated_tensorflow
from tfrs_embed.tools.testing.emulated_program import (
    ProgramReplicas,
    require_reducible,
)

_FEATURE = topology_pb2.TPUHardwareFeature.EmbeddingFeature.V2


class EmulatedTPUStrategy(tpu_strategy.TPUStrategyV2):
    """Runs code written for `tf.distribute.TPUStrategy` on CPUs.

    The strategy emulates a slice whose chips have SparseCores. Each chip is a
    replica on a logical CPU, and TensorFlow's own
    `tf.tpu.experimental.embedding.TPUEmbeddingV2` looks up and trains tables
    with the slice's layout, limits and pipelining. Results equal a TPU's, up
    to the order in which numbers are added; speed says nothing about a TPU's.

    Make the strategy before TensorFlow runs its first operation, which fixes
    the number of logical CPUs. Afterwards the emulation replaces TensorFlow's
    SparseCore operations under such a strategy, and nowhere else.

    Example:
        >>> strategy = tfrs_embed.testing.EmulatedTPUStrategy("v5p-8")
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
        >>> with strategy.scope():
        ...     layer = tfrs_embed.PartialTPUEmbedding(
        ...         tfrs_embed.FeatureConfig("movie", table), "adagrad"
        ...     )
        >>> layer.placement.tables[0].engine
        'sparsecore'

    A TPU needs `run` to be called in a `tf.function` that looks up or updates.
    Here a `tf.function` that is passed to `run` works too.

    Attributes:
        topology: the slice, a `tfrs_embed.sparsecore.Topology`.

    Args:
        topology: the slice's name as `tpu_check.Slice.of` takes it, such
            as "v5p-8" or "v6e:2x2", or a pair (chips, sparse_cores_per_chip).

    Raises:
        ValueError: the topology does not exist.
        TypeError: neither a name nor a pair.
        RuntimeError: TensorFlow is older than 2.17, or has already started with
            fewer logical CPUs than the slice has chips.
    """

    #: Read by MirroredStrategy's code.
    _collective_key_base = 0

    def __init__(self, topology: str | tuple[int, int] | Topology) -> None:
        require_sparse_core_api()
        self.topology = Topology.of(topology)
        _make_logical_cpus(self.topology.chips)
        # TPUStrategy's own __init__ looks for TPUs.
        tf.distribute.Strategy.__init__(
            self, _EmulatedExtended(self, self.topology)
        )
        emulated_tensorflow.install()

    def run(
        self,
        fn: Callable[..., Any],
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Any = None,
    ) -> Any:
        """See the base class."""
        tpu_strategy.validate_run_function(fn)
        if tf.executing_eagerly():
            return tf.distribute.Strategy.run(self, fn, args, kwargs, options)
        if isinstance(fn, def_function.Function):
            # Merge calls work only in the graph of `run` itself.
            fn = fn.python_function
        fn = autograph.tf_convert(fn, ag_ctx.control_status_ctx())
        state = embedding_pipelining_state
        enabled = state.enabled

        @tf.autograph.experimental.do_not_convert
        def replica_fn(*args: Any, **kwargs: Any) -> Any:
            # A replica is traced in another thread than the caller's.
            state.enabled = enabled
            # Each replica of a TPU gets inputs of its own, even if they are
            # the same tensor.
            args, kwargs = tf.nest.map_structure(
                lambda x: tf.identity(x) if tf.is_symbolic_tensor(x) else x,
                (args, kwargs),
                expand_composites=True,
            )
            return fn(*args, **kwargs)

        with self.extended.building() as replicas:
            result = tf.distribute.Strategy.run(
                self, replica_fn, args, kwargs, options
            )
        replicas.check_kernels()
        return result


class _EmulatedExtended(mirrored_strategy.MirroredExtended):
    """MirroredStrategy's extension with the attributes of TPUStrategy's."""

    num_hosts = 1
    steps_per_run = 1
    _tpu_cluster_resolver = None
    _use_spmd_for_xla_partitioning = False

    def __init__(self, strategy: Any, topology: Topology) -> None:
        devices = [f"/device:CPU:{i}" for i in range(topology.chips)]
        super().__init__(
            strategy,
            devices=devices,
            # Collectives would have the same keys in all strategies of a
            # process.
            cross_device_ops=cross_device_ops.ReductionToOneDevice(),
        )
        self._topology = topology
        #: The replicas being built by nested calls of `run`.
        self._building: list[ProgramReplicas] = []
        self._tpu_devices = np.array([[d] for d in self._devices], object)
        self._host_device = device_util.get_host_for_device(self._devices[0])
        self._require_static_shapes = True

    @contextlib.contextmanager
    def building(self) -> Iterator[ProgramReplicas]:
        """Collects the operations that the replicas of a call of `run` make."""
        self._building.append(ProgramReplicas(tf.compat.v1.get_default_graph()))
        try:
            yield self._building[-1]
        finally:
            self._building.pop()

    def on_tpu(self, op: tf.Operation) -> bool:
        """Whether an operation would run on a TPU."""
        return bool(self._building) and self._building[-1].has(op)

    def on_host(self) -> AbstractContextManager[None]:
        """A context in which operations are the host's."""
        if not self._building:
            return contextlib.nullcontext()
        return self._building[-1].without()

    def _reduce_to(
        self, reduce_op: Any, value: Any, destinations: Any, options: Any
    ) -> Any:
        if self._building:
            require_reducible(reduce_op, value)
            value = _dense(value)
        return super()._reduce_to(reduce_op, value, destinations, options)

    def _batch_reduce_to(
        self, reduce_op: Any, value_destination_pairs: Any, options: Any
    ) -> Any:
        pairs = list(value_destination_pairs)
        if self._building:
            require_reducible(reduce_op, [value for value, _ in pairs])
            pairs = [(_dense(value), where) for value, where in pairs]
        return super()._batch_reduce_to(reduce_op, pairs, options)

    @property
    def num_replicas_per_host(self) -> int:
        return self._topology.chips

    @property
    def tpu_hardware_feature(self) -> Any:
        return tpu_hardware_feature.HardwareFeature(
            topology_pb2.TPUHardwareFeature(
                embedding_feature=_FEATURE,
                num_embedding_devices_per_chip=self._topology.sparse_cores,
            )
        )

    def _create_variable(self, next_creator: Any, **kwargs: Any) -> Any:
        # A shard of a table is not mirrored.
        if kwargs.pop("skip_mirrored_creator", False):
            return next_creator(**kwargs)
        return super()._create_variable(next_creator, **kwargs)

    def _experimental_distribute_dataset(
        self, dataset: Any, options: Any
    ) -> Any:
        self._check_fetched(dataset.element_spec, options)
        return super()._experimental_distribute_dataset(dataset, options)

    def _distribute_datasets_from_function(
        self, dataset_fn: Any, options: Any
    ) -> Any:
        datasets = super()._distribute_datasets_from_function(
            dataset_fn, options
        )
        self._check_fetched(datasets.element_spec, options)
        return datasets

    def _check_fetched(self, element_spec: Any, options: Any) -> None:
        # A TPU can't hold sparse or ragged tensors.
        if options is None or options.experimental_fetch_to_device:
            tpu_strategy.TPUExtended._check_spec(self, element_spec)


def _make_logical_cpus(number: int) -> None:
    cpu = tf.config.list_physical_devices("CPU")[0]
    made = tf.config.get_logical_device_configuration(cpu) or [None]
    if len(made) >= number:
        return
    try:
        tf.config.set_logical_device_configuration(
            cpu, [tf.config.LogicalDeviceConfiguration()] * number
        )
    except RuntimeError:
        raise RuntimeError(
            f"The slice has {number} chips, but TensorFlow was already started "
            f"with {len(made)} logical CPUs. Make the EmulatedTPUStrategy "
            "before the first TensorFlow operation; if there are several, the "
            "largest first."
        ) from None


def _dense(value: Any) -> Any:
    """Makes gradients of rows dense, as a sum over TPUs does."""
    if isinstance(value, tf.distribute.DistributedValues):
        parts = value.values
        if any(isinstance(part, tf.IndexedSlices) for part in parts):
            return distribute_utils.regroup(tuple(map(_dense, parts)))
    if isinstance(value, tf.IndexedSlices):
        with tf.device(value.device):
            return tf.convert_to_tensor(value)
    return value
