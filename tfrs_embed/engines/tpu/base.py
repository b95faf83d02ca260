"""The base class of the engines for all generations of TPUs."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tfrs_embed.compat import graphs, strategies
from tfrs_embed.compat.private_tensorflow import record
from tfrs_embed.compat.strategies import on_host
from tfrs_embed.configs.tables import FeatureSpec, TableSpec
from tfrs_embed.engines.engine import (
    Engine,
    FixedBatches,
    LookupCall,
    refuse_to_train,
)
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.ops import lookup as lookup_ops
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.sample_matrix import as_ragged
from tfrs_embed.optimizers.conversion import require_tpu
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.sparsecore import tf_configs
from tfrs_embed.sparsecore.stacking import Groups
from tfrs_embed.storage.initial_values import initial_blocks


class TPUEngine(Engine, FixedBatches):
    """Holds tables in one of TensorFlow's TPU embedding classes.

    A TPU program has fixed shapes, so each feature's number of samples must be
    known before the tables are made; smaller batches are padded. Everything
    that reads ids runs on the host: ids come from there, and a compiled program
    checks nothing.

    Raises:
        ValueError: a table has too many rows for int32, or an optimizer that
            these TPUs don't have.
    """

    #: The names of the `UpdateOptions` that these TPUs have.
    _options: ClassVar[tuple[str, ...]] = ()

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        self._rates: dict[int, tf.Tensor] = {}
        # TensorFlow's object; None before `build`.
        self._embedding: Any = None
        for table, optimizer in self.optimizers.items():
            if optimizer is not None:
                require_tpu(optimizer, f"Table '{table}'", self._options)
        for state in self.states.values():
            if state.spec.vocabulary_size > tf.int32.max:
                raise ValueError(
                    f"Table '{state.spec.name}': {state.spec.vocabulary_size} "
                    f"rows; ids on a TPU are int32, so a table has at most "
                    f"{tf.int32.max}."
                )
        self._batch = options.batch_size
        self._samples: list[int | None] = []
        for feature in self.features:
            batch, *rest = feature.output_shape or (None, None)
            for size in (feature.batch_size, self._batch):
                batch = size if batch is None else batch
            self._samples.append(tf.TensorShape([batch, *rest]).num_elements())

    def require_all(self, given: Sequence[bool]) -> None:
        if all(given) or not strategies.in_replica(self._strategy):
            return
        absent = [
            feature.name
            for feature, there in zip(self.features, given, strict=True)
            if not there
        ]
        raise NotImplementedError(
            f"{self._name}: a call with partial=True in strategy.run has no "
            f"ids for {absent}, but a TPU's tables are looked up with all of "
            "their features together. Call the layer once in a step with all "
            "of them, and hand its activations to each part of the model."
        )

    def observe_batch(self, bags: Sequence[BaggedIds | None]) -> None:
        if self._step is not None:
            return
        for i, each in enumerate(bags):
            if each is None or self._samples[i] is not None:
                continue
            if each.static_shape.rank is not None:
                # A scalar is a batch of 1.
                batch, *rest = each.static_shape.as_list() or [1]
                sizes = [n for n in (batch, self._batch) if n is not None]
                largest = max(sizes, default=None)
                shape = tf.TensorShape([largest, *rest])
                self._samples[i] = shape.num_elements()

    @property
    def can_build(self) -> bool:
        return None not in self._samples

    def raise_limits(self, bags: Sequence[BaggedIds]) -> None:
        """Does nothing: this hardware has no limits."""

    def _build(self) -> tf.Variable:
        for table, variables in self._make_tables().items():
            # `add` may restore a checkpoint, so initial values come first.
            for key, variable in variables.items():
                self.states[table].add(key, variable)
        # Every replica reads the step; all count alike.
        return tf.Variable(
            tf.constant(0, tf.int64),
            trainable=False,
            name="step",
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    @abc.abstractmethod
    def _make_tables(self) -> dict[str, dict[str, Any]]:
        """Makes TensorFlow's object, and the tables' initial rows.

        Returns the variables by table, then by "parameters" or the slot's name.
        """

    def _feature_configs(self, stacking: Groups | None = None) -> list[Any]:
        """TensorFlow's configs of the features."""
        return tf_configs.feature_configs(
            self.features,
            self._padded(),
            tf_configs.layer_optimizers(
                self.optimizers, lambda o: self._rates[id(o)], stacking
            ),
        )

    def lookup(self, call: LookupCall) -> tuple[list[tf.Tensor], Any]:
        """See the base class; outside of strategy.run it reads the tables."""
        bags = call.bags
        if not strategies.in_replica(self._strategy):
            return [
                lookup_ops.combine(
                    self._read(feature.table.name, each.ids), None, each
                )
                for feature, each in zip(self.features, bags, strict=True)
            ], None
        require_room(
            self.features, [each.static_count for each in bags], self._samples
        )
        # Outside of tapes there is no update, for which embedding cores and
        # pipelined SparseCores would wait.
        updates = call.training and record.could_possibly_record()
        vectors, residuals, valid = self._lookup(bags, updates)
        cut = [_cut(v, b) for v, b in zip(vectors, bags, strict=True)]
        return cut, (residuals, valid)

    @abc.abstractmethod
    def _read(self, name: str, ids: tf.Tensor) -> tf.Tensor:
        """Rows of a table, [n, dim], outside of any replica."""

    @abc.abstractmethod
    def _lookup(
        self, bags: Sequence[BaggedIds], training: bool
    ) -> tuple[list[tf.Tensor], Any, tf.Tensor]:
        """Looks up in a replica; `training`: whether an update may follow.

        Returns each feature's [samples, dim], residuals, and a tensor on the
        TPU that only exists if all ids are good.
        """

    def apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        if residuals is None:
            refuse_to_train(
                f"{self._name} is trained by the replicas of a TPUStrategy "
                "together: call it, and the gradient, inside strategy.run."
            )
            return
        step = tf.convert_to_tensor(self._step)
        self._rates = {
            id(o): _rate(o, step) for o in self.optimizers.values() if o
        }
        padded = [
            _pad_rows(g, samples)
            for g, samples in zip(gradients, self._padded(), strict=True)
        ]
        inner, valid = residuals
        self._apply_gradients(inner, padded)
        # No replica may count a step if another one's ids are bad.
        replicas = tf.distribute.get_replica_context()
        with tf.control_dependencies(graphs.capture([valid])):
            # TPUs can't sum int64 over replicas.
            one = tf.identity(tf.constant(1, tf.int32))
        done = replicas.all_reduce(tf.distribute.ReduceOp.SUM, one)
        done //= replicas.num_replicas_in_sync
        self._step.assign_add(tf.cast(done, tf.int64))

    def _padded(self) -> list[int]:
        """Each feature's padded number of samples; None is an error."""
        padded = []
        for feature, samples in zip(self.features, self._samples, strict=True):
            if samples is None:
                raise ValueError(
                    f"{feature}: the number of its samples isn't known, and a "
                    "TPU's tables need it. Give the feature an output_shape, "
                    "or call the layer first: with ids of a static shape "
                    "(tf.data's batch(..., drop_remainder=True)), or with the "
                    "feature's input_shape, or the batch_size of a "
                    "PartialTPUEmbedding, set."
                )
            padded.append(samples)
        return padded

    @abc.abstractmethod
    def _apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        """Updates the tables from each feature's [samples, dim] gradient."""


def new_rows(
    table: TableSpec, strategy: tf.distribute.Strategy
) -> Iterator[tuple[int, tf.Tensor]]:
    """Yields the first row and the rows of a new table's blocks."""
    # Offline tables have no memory.
    if not strategies.is_offline(strategy):
        yield from initial_blocks(table)


def require_room(
    features: Sequence[FeatureSpec],
    counts: Sequence[int | None],
    made_for: Sequence[int | None],
) -> None:
    """Requires that tables were made for so many samples a replica."""
    for feature, count, samples in zip(features, counts, made_for, strict=True):
        assert samples is not None and count is not None
        if count > samples:
            raise ValueError(
                f"{feature}: {count} samples in a replica's batch, but the "
                f"tables were made for at most {samples}. Set the feature's "
                "output_shape, or the batch_size of a PartialTPUEmbedding, to "
                "the largest batch."
            )


def as_samples(
    features: Sequence[FeatureSpec],
    bags: Sequence[BaggedIds],
    samples: Sequence[int],
) -> tuple[list[tf.RaggedTensor], list[tf.RaggedTensor | None]]:
    """Returns features' ids and weights by sample, made on the host.

    Each feature has `samples` samples.
    """
    for feature, each in zip(features, bags, strict=True):
        combiner = feature.table.combiner
        if combiner != "sum" and each.weights is not None is each.scale:
            raise ValueError(
                f"{feature}: these ids aren't combined, and TPUs would divide "
                f"their weights by themselves (combiner='{combiner}'): give "
                "the table combiner='sum', with which a weight multiplies its "
                "id's vector."
            )
    rows = [
        on_host(as_ragged, *each) for each in zip(bags, samples, strict=True)
    ]
    return [r[0] for r in rows], [r[1] for r in rows]


def _cut(vectors: tf.Tensor, bags: BaggedIds) -> tf.Tensor:
    """The vectors without padding samples."""
    count = bags.static_count
    return vectors if count == vectors.shape[0] else vectors[:count]


def _pad_rows(rows: tf.Tensor, count: int) -> tf.Tensor:
    """Pads with zeros to `count` rows."""
    if rows.shape[0] == count:
        return rows
    return tf.pad(rows, [[0, count - rows.shape[0]], [0, 0]])


def _rate(optimizer: TableOptimizer, step: tf.Tensor) -> tf.Tensor:
    """The learning rate of this step, a scalar float32."""
    variable = optimizer.rate.variable
    # A strategy's variable is on the TPU. A plain one is on the host, and the
    # TPU's program can't read it.
    on_device = (type(None), tf.distribute.DistributedValues)
    if isinstance(variable, on_device):
        return optimizer.rate.at(step)
    return on_host(optimizer.rate.at, step)
