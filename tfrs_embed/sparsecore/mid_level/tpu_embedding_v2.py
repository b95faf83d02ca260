"""`TPUEmbeddingV2` on a TPU, and on a named topology without one."""

from __future__ import annotations

import abc
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import strategies
from tfrs_embed.compat.private_tensorflow import (
    PartitionedCsrFormatTensor,
    nest,
)
from tfrs_embed.ops.checks import Checks
from tfrs_embed.ops.update import (
    PARAMETERS,
    GradientContributions,
    TableUpdate,
    update_unique,
)
from tfrs_embed.ops.validation import require_valid
from tfrs_embed.optimizers.learning_rate import call
from tfrs_embed.sparsecore import host_buffers
from tfrs_embed.sparsecore.coo import Ids
from tfrs_embed.sparsecore.device import (
    Entries,
    activations,
    decode,
    quantize,
    row_gradients,
)
from tfrs_embed.sparsecore.limits.loads import Loads
from tfrs_embed.sparsecore.mid_level import buffers as buffers_lib
from tfrs_embed.sparsecore.mid_level import inputs, stack_activations
from tfrs_embed.sparsecore.mid_level.on_tpu import TPUEmbeddingV2OnTPU
from tfrs_embed.sparsecore.mid_level.stacked_tables import StackedTables
from tfrs_embed.sparsecore.setup import CheckedConfig, check_config
from tfrs_embed.sparsecore.topology import Topology

# AutoGraph would take longer than tracing, and convert nothing.
_not_converted = tf.autograph.experimental.do_not_convert


class TPUEmbeddingV2(StackedTables, metaclass=abc.ABCMeta):
    """TensorFlow's mid-level API for SparseCores, with or without a TPU.

    Under a TPUStrategy this makes a
    `tf.tpu.experimental.embedding.TPUEmbeddingV2` that checks its configuration
    and its ids. Elsewhere one process computes the results of all chips of a
    named topology: it fills the chips' buffers of ids, and looks up and updates
    rows by the buffers.

    Elsewhere a call also takes the batches of all chips, which follow each
    other: the shape [output_shape[0], ...] of one chip becomes [chips *
    output_shape[0], ...], and so do the chips' buffers.

    Example:
        >>> tpu = tf.tpu.experimental.embedding
        >>> movies = tpu.TableConfig(1000, 16, name="movies")
        >>> embedding = tfrs_embed.TPUEmbeddingV2(
        ...     {"movie": tpu.FeatureConfig(movies, output_shape=[8])},
        ...     tpu.Adagrad(0.05),
        ...     topology="v6e-1",
        ... )
        >>> activations, buffers = embedding({"movie": tf.range(8)})
        >>> activations["movie"].shape
        TensorShape([8, 16])
        >>> embedding.apply_gradients({"movie": tf.ones([8, 16])}, buffers)

    Args:
        feature_config: nested `tf.tpu.experimental.embedding.FeatureConfig`s
            with the output_shape of one chip.
        optimizer: a `tf.tpu.experimental.embedding` optimizer, for tables that
            have none. A table without any is not trained; a TPUStrategy needs
            one for each table.
        pipeline_execution_with_tensor_core: whether, in a `tf.while_loop` of
            steps, a step's update comes after the next step's lookup. Only
            under a TPUStrategy.
        sparse_core_embedding_config: a
            `tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig`; None:
            TensorFlow's defaults.
        topology: a slice, "v5p-8" or (chips, SparseCores per chip). Under a
            TPUStrategy None, or the strategy's.

    Raises:
        ValueError: a value that is missing, out of range, or has no effect; or
            no topology where there is no TPU.
        TypeError: a value of the wrong kind.
        NotImplementedError: pipelining without a TPUStrategy.
        RuntimeError: another strategy, or TensorFlow lacks the operations.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        if strategies.is_tpu(tf.distribute.get_strategy()):
            return TPUEmbeddingV2OnTPU(*args, **kwargs)
        return super().__new__(cls)

    def __init__(
        self,
        feature_config: Any,
        optimizer: Any = None,
        pipeline_execution_with_tensor_core: bool = False,
        sparse_core_embedding_config: Any = None,
        *,
        topology: Any = None,
    ) -> None:
        _refuse_strategy()
        if topology is None:
            raise ValueError(
                "TPUEmbeddingV2 needs a topology to emulate where there is no "
                "TPUStrategy: topology='v5p-8', or (chips, SparseCores of "
                "each)."
            )
        if pipeline_execution_with_tensor_core:
            raise NotImplementedError(
                "TPUEmbeddingV2: pipeline_execution_with_tensor_core=True "
                "needs a TPUStrategy; without a TPU make it under "
                "tfrs_embed.testing.EmulatedTPUStrategy."
            )
        setup = check_config(
            feature_config,
            optimizer,
            Topology.of(topology),
            sparse_core_embedding_config,
        )
        super().__init__(setup)

    @classmethod
    def compute_sparse_core_stats(
        cls,
        features: Any,
        feature_config: Any,
        num_tpu_chips: int,
        num_sc_per_chip: int = 4,
        optimizer: Any = None,
        sparse_core_embedding_config: Any = None,
    ) -> tuple[dict[str, tf.Tensor], dict[str, tf.Tensor]]:
        """Counts the limits that a batch needs, executing eagerly.

        Args:
            features: one chip's ids, nested as the configuration.
            feature_config: as the class takes it.
            num_tpu_chips: number of chips.
            num_sc_per_chip: SparseCores per chip.
            optimizer: for tables that have none.
            sparse_core_embedding_config: as the class takes it.

        Returns:
            By stack, the most ids and the most unique ids that a SparseCore
            sends to a shard, scalar int32.

        Raises:
            ValueError, TypeError: see the class.
            tf.errors.InvalidArgumentError: bad ids.
        """
        setup = check_config(
            feature_config,
            optimizer,
            Topology.of((num_tpu_chips, num_sc_per_chip)),
            sparse_core_embedding_config,
        )
        loads = Loads(setup.layout)
        loads.add(
            [
                Ids(np.asarray(splits, np.int32), np.asarray(values, np.int32))
                for splits, values, _ in _ids(
                    setup, features, None, 1, Checks()
                )
            ]
        )
        stacks = loads.stacks.items()
        return (
            {name: tf.constant(int(s.ids.max())) for name, s in stacks},
            {name: tf.constant(int(s.unique_ids.max())) for name, s in stacks},
        )

    @_not_converted
    def enqueue(
        self, features: Any, weights: Any = None, device: str | None = None
    ) -> host_buffers.Enqueued:
        """Fills the chips' buffers of ids.

        Args:
            features: nested ids: Tensors, one id per sample; or RaggedTensors
                or SparseTensors of rank 2, one row of ids per sample.
            weights: None, or nested weights of the ids' kinds, with the same
                row splits or indices; None for a feature without.
            device: None or a TPU's name; buffers are on the host.

        Returns:
            By stack, the buffers and the unpadded sizes of their row pointers
            and of their ids: scalars for one chip, else [chips].

        Raises:
            ValueError: another structure or shape, or a device that is no TPU.
            TypeError: another kind of ids or weights.
            tf.errors.InvalidArgumentError: an id outside its table, indices out
                of order, another number of samples, or more ids than a limit
                allows.
        """
        if device is not None:
            kind = tf.DeviceSpec.from_string(device).device_type
            if kind != "TPU":
                raise ValueError(f"Non-TPU device {device} passed to enqueue.")
        chips = self._layout.topology.chips
        with tf.device("CPU:0"):
            checks = Checks()
            ids = _ids(self._setup, features, weights, chips, checks)
            return host_buffers.fill_buffers(self._layout, ids, chips, checks)

    @_not_converted
    def dequeue(
        self, partitioned_tensors: host_buffers.Enqueued
    ) -> tuple[Any, buffers_lib.Preserved]:
        """Looks up the ids in buffers.

        Args:
            partitioned_tensors: the result of `enqueue`.

        Returns:
            The activations, nested as the configuration, each [chips *
            output_shape[0], ..., dim] float32; and the buffers, for
            `apply_gradients`.

        Raises:
            ValueError: not a result of `enqueue`.
        """
        _refuse_strategy()
        buffers = buffers_lib.checked(
            self._layout,
            partitioned_tensors,
            "dequeue takes the result of enqueue",
            enqueued=True,
        )
        self.build()
        by_stack = {}
        for name, stack in self._layout.stacks.items():
            entries = self._entries(name, buffers[name])
            rows = tf.gather(self._variables[name][PARAMETERS], entries.row)
            config = self._layout.stacking.quantization_configs[name]
            if config is not None:
                rows = quantize(
                    rows, config.lower, config.upper, config.num_buckets
                )
            samples = self._layout.topology.chips * stack.samples
            by_stack[name] = activations(entries, rows, samples)
        flat = stack_activations.unstack(self._layout, by_stack)
        return nest.pack_sequence_as(self._setup.feature_config, flat), buffers

    @_not_converted
    def embedding_lookup(
        self, features: Any, weights: Any = None
    ) -> tuple[Any, buffers_lib.Preserved]:
        """Looks ids up: `dequeue(enqueue(features, weights))`.

        Args:
            features: as `enqueue` takes them.
            weights: as `enqueue` takes them.

        Returns:
            The results of `dequeue`.
        """
        return self.dequeue(self.enqueue(features, weights))

    # Not the same function: subclasses may override the lookup.
    @_not_converted
    def __call__(
        self, features: Any, weights: Any = None
    ) -> tuple[Any, buffers_lib.Preserved]:
        return self.embedding_lookup(features, weights)

    @_not_converted
    def apply_gradients(
        self, gradients: Any, preserved_outputs: buffers_lib.Preserved
    ) -> None:
        """Updates the rows of a lookup.

        Args:
            gradients: nested as the configuration, each of its activations'
                shape, float32. None stands for zeros: the feature's rows are
                updated all the same, and momentum or decay changes them.
            preserved_outputs: the second result of `dequeue`.

        Raises:
            RuntimeError: nothing has been built, or a table has no optimizer.
            ValueError: another structure, or no float32 Tensor of the shape.
        """
        if not self._built:
            raise RuntimeError(
                "apply_gradients called on unbuilt TPUEmbeddingV2 object. "
                "Please either call the embedding lookup method first or "
                "manually call the build method."
            )
        buffers = buffers_lib.checked(
            self._layout,
            preserved_outputs,
            "apply_gradients takes the second result of dequeue",
        )
        by_stack = stack_activations.stack(
            self._layout,
            stack_activations.check_gradients(self._setup, gradients),
        )
        updates = []
        for name, stack in self._layout.stacks.items():
            table = stack.tables[0]
            if table.optimizer is None:
                raise RuntimeError(
                    f"Table '{table.name}' has no optimizer; give it one, or "
                    "TPUEmbeddingV2(..., optimizer) for all tables."
                )
            entries = self._entries(name, buffers[name])
            rows, sums = row_gradients(entries, by_stack[name])
            rate = tf.convert_to_tensor(call(table.optimizer.learning_rate))
            rule = self._setup.rules[name]
            assert rule is not None
            change = TableUpdate(
                dict(self._variables[name]),
                rule,
                tf.cast(rate, tf.float32),
                GradientContributions([], []),
            )
            updates.append((change, rows, sums))
        # All sums are computed before a table changes.
        ready = [t for change, *sums in updates for t in (change.rate, *sums)]
        with tf.control_dependencies(ready):
            for update in updates:
                update_unique(*update)

    def _entries(
        self, name: str, buffers: PartitionedCsrFormatTensor
    ) -> Entries:
        topology, stack = self._layout.topology, self._layout.stacks[name]
        rows = stack.rows // topology.shards
        return decode(
            buffers[:4], topology, stack.samples, rows, topology.chips
        )


def _refuse_strategy() -> None:
    if tf.distribute.has_strategy():
        raise RuntimeError(
            "TPUEmbeddingV2 runs under a TPUStrategy, or emulates a topology "
            "in one process without a strategy; found "
            f"{type(tf.distribute.get_strategy()).__name__}. For several "
            "replicas without a TPU use PartialTPUEmbedding, or "
            "tfrs_embed.testing.EmulatedTPUStrategy."
        )


def _ids(
    setup: CheckedConfig,
    features: Any,
    weights: Any,
    chips: int,
    checks: Checks,
) -> list[Ids]:
    """Checks a call's nested ids and weights, and groups them by sample."""
    flat = setup.flatten(features, "features")
    flat_weights = [None] * len(flat)
    if weights is not None:
        flat_weights = setup.flatten(weights, "weights")
    parsed = inputs.parse(
        setup.features, setup.layout, flat, flat_weights, chips, checks
    )
    require_valid(parsed, checks, training=True)
    return inputs.by_sample(setup.layout, parsed, chips)


TPUEmbeddingV2.register(TPUEmbeddingV2OnTPU)
