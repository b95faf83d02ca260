"""Computes the limits that a data set needs on SparseCores, with a report."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import progress as tasks
from tfrs_embed.configs.parsing import parse
from tfrs_embed.configs.tables import EmbeddingSpec, FeatureSpec
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.inputs import CallInputs, lookup_bags, to_bags
from tfrs_embed.ops.tensors import to_tensor
from tfrs_embed.sparsecore.buffers import padded_sizes
from tfrs_embed.sparsecore.limits.loads import Loads, StackLoads, of_chips
from tfrs_embed.sparsecore.limits.report import (
    LimitsReport,
    StackLoad,
    TableLoad,
)
from tfrs_embed.sparsecore.setup import CheckedConfig, check_config
from tfrs_embed.sparsecore.tf_configs import (
    declares_samples,
    feature_configs,
    untrained_optimizers,
)
from tfrs_embed.sparsecore.topology import Topology

#: Bytes of an id in a buffer: sample, row and gain.
_BYTES_PER_ID = 12
_NO_BATCHES = "There are no batches to compute limits from."


def compute_limits(
    batches: Iterable[Any],
    feature_config: Any,
    topology: str | tuple[int, int] | Topology,
    optimizer: Any = None,
    safety: float = 1.0,
    *,
    size_threshold: int = 0,
    sparse_core_embedding_config: Any = None,
    progress: bool = True,
) -> tuple[Any, LimitsReport]:
    """Computes the smallest limits that hold some batches.

    A SparseCore has room for a fixed number of ids for each other SparseCore,
    and training stops at a batch with more. The computed limits hold every
    given batch, times `safety`. No TPU is needed.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
        >>> features = {"movie": tfrs_embed.FeatureConfig("movie", table)}
        >>> batches = [{"movie": tf.range(64)}, {"movie": tf.range(64) * 16}]
        >>> config, report = tfrs_embed.sparsecore.compute_limits(
        ...     batches, features, "v5p-8", "adagrad", progress=False
        ... )
        >>> config.max_ids_per_table
        {'movie': 16}

    Args:
        batches: a `tf.data.Dataset` or an iterable of batches of ONE chip,
            nested as `feature_config`: dense, ragged or sparse tensors, arrays,
            or lists.
        feature_config: nested FeatureConfigs, TensorFlow's or tfrs_embed's. A
            feature's samples are those of TensorFlow's output_shape, if there
            is one; else those of the first batch, padded as
            `PartialTPUEmbedding` pads them.
        topology: see `Topology.of`: "v5p-8", or (chips, SparseCores per
            chip).
        optimizer: for tables that have none, as a layer's. Optimizers decide
            which tables are stacked, and how many slots they have.
        safety: factor by which the limits are raised, at least 1.
        size_threshold: tables with at most so many rows are left out, as in
            `PartialTPUEmbedding`.
        sparse_core_embedding_config: a `SparseCoreEmbeddingConfig` whose other
            settings are kept; the report has the headroom to its limits.
        progress: whether to show how many batches were read, as
            `tfrs_embed.progress.set_mode` says.

    Returns:
        A `SparseCoreEmbeddingConfig` with max_ids_per_table,
        max_unique_ids_per_table (by stack) and max_ids_per_chip_per_sample;
        and the report, which prints as a table.

    Raises:
        ValueError: no batches; a batch that does not fit the configuration; an
            id outside its table; or a setting out of range.
        TypeError: a value of the wrong kind.
    """
    topology = Topology.of(topology)
    # NaN fails this, too.
    if not 1 <= safety < math.inf:
        raise ValueError(
            f"safety must be a number >= 1, got {safety!r}; 1 gives limits "
            "that just hold these batches."
        )
    features, stream = _tables_on_sparse_cores(
        batches, parse(feature_config), size_threshold
    )
    lookups = [each for feature in features for each in feature.lookups]
    samples: list[int | None] = [None] * len(lookups)
    if not all(map(declares_samples, lookups)):
        first = next(stream, None)
        if first is None:
            raise ValueError(_NO_BATCHES)
        stream = itertools.chain([first], stream)
        cores = topology.sparse_cores
        samples = [
            None
            if declares_samples(lookup)
            else max(1, -(-int(bags.count) // cores)) * cores
            for lookup, bags in zip(lookups, first, strict=True)
        ]
    configs = feature_configs(
        lookups, samples, untrained_optimizers(lookups, optimizer)
    )
    setup = check_config(
        {config.name: config for config in configs},
        None,
        topology,
        sparse_core_embedding_config,
    )
    loads = _TableLoads(setup, lookups)
    with tasks.Task(
        "Reading",
        "batches for limits",
        tasks.size_of(batches),
        "batches",
        show=progress,
    ) as task:
        for bags in task.count(stream):
            loads.add(bags)
    return loads.report(safety)


class _TableLoads:
    """The loads of batches, and how often each table's ids occur in them."""

    def __init__(
        self, setup: CheckedConfig, lookups: Sequence[FeatureSpec]
    ) -> None:
        self._setup, self._loads = setup, Loads(setup.layout)
        self._lookups = [lookups[i] for i in setup.order]
        self._tables = list({x.table.name: x.table for x in lookups}.values())
        # Zeros take no memory until they are written to.
        self._seen = {
            table.name: np.zeros(table.vocabulary_size, np.bool_)
            for table in self._tables
        }
        self._ids = dict.fromkeys(self._seen, 0)
        self._batches = 0

    def add(self, bags: Sequence[BaggedIds]) -> None:
        """Counts a batch, given the bags of each lookup."""
        ids = []
        for i, lookup, feature in zip(
            self._setup.order,
            self._lookups,
            self._setup.layout.features,
            strict=True,
        ):
            count = int(bags[i].count)
            if count > feature.samples:
                raise ValueError(
                    f"batch {self._batches}: {lookup}: {count} samples, but "
                    f"the first batch has room for {feature.samples}; begin "
                    "with the largest."
                )
            [of_chip] = of_chips(bags[i], feature.samples)
            ids.append(of_chip)
            self._ids[lookup.table.name] += of_chip.values.size
            self._seen[lookup.table.name][of_chip.values] = True
        self._loads.add(ids)
        self._batches += 1

    def report(self, safety: float) -> tuple[Any, LimitsReport]:
        """Returns the config with limits for the loads, and the report."""
        if not self._batches:
            raise ValueError(_NO_BATCHES)
        setup, config = self._setup, self._loads.config(safety)
        total = sum(self._ids.values())
        tables = tuple(
            TableLoad(
                table=table.name,
                stack=setup.layout.stack_of[table.name],
                rows=table.vocabulary_size,
                dim=table.dim,
                ids=self._ids[table.name],
                unique_ids=int(np.count_nonzero(self._seen[table.name])),
                share=self._ids[table.name] / max(1, total),
            )
            for table in self._tables
        )
        stacks = tuple(
            _stack_load(setup, name, of_stack, config)
            for name, of_stack in self._loads.stacks.items()
        )
        name = setup.layout.topology.name
        return config, LimitsReport(name, self._batches, tables, stacks)


def _tables_on_sparse_cores(
    batches: Iterable[Any], spec: EmbeddingSpec, size_threshold: int
) -> tuple[list[FeatureSpec], Iterator[list[BaggedIds]]]:
    """Returns the features of large tables, and the bags of each batch."""
    places = [
        place
        for place, feature in enumerate(spec.features)
        if feature.table.vocabulary_size > size_threshold
    ]
    if not places:
        raise ValueError(
            f"No table has more than size_threshold={size_threshold} rows: "
            "none is on SparseCores. Lower it."
        )
    # In TensorFlow's class, which has no sequences, a row of ids is a sample.
    features = [
        dataclasses.replace(feature, sequences=False)
        if declares_samples(feature)
        else feature
        for feature in (spec.features[place] for place in places)
    ]
    leaves = (
        spec.structure.flatten(batch, f"batch {number}")
        for number, batch in enumerate(batches)
    )
    return features, _parse(features, ([x[i] for i in places] for x in leaves))


def _parse(
    features: Sequence[FeatureSpec], batches: Iterable[Sequence[Any]]
) -> Iterator[list[BaggedIds]]:
    """Yields the bags of each batch's lookups, as a layer makes them."""
    for number, given in enumerate(batches):
        where = f"batch {number}"
        try:
            ids = [*map(_to_tensor, features, given)]
            bags = to_bags(CallInputs(features, ids, [None] * len(ids)))
        except (ValueError, TypeError) as error:
            raise type(error)(f"{where}: {error}") from error
        except tf.errors.InvalidArgumentError as error:
            raise ValueError(f"{where}: {error.message}") from error
        yield lookup_bags(features, bags)


def _to_tensor(feature: FeatureSpec, given: Any) -> Any:
    if isinstance(given, tf.compat.v1.SparseTensorValue):
        return tf.SparseTensor.from_value(given)
    if isinstance(given, tf.compat.v1.ragged.RaggedTensorValue):
        return tf.RaggedTensor.from_row_splits(given.values, given.row_splits)
    given = to_tensor(given, f"{feature}: ids")
    if isinstance(given, tf.Tensor) and declares_samples(feature):
        # TensorFlow accepts any shape of one id per sample.
        here = tf.TensorShape(given.shape)
        wanted = tf.TensorShape(feature.output_shape)
        if here != wanted and here.num_elements() == wanted.num_elements():
            return tf.reshape(given, wanted)
    return given


def _stack_load(
    setup: CheckedConfig, name: str, loads: StackLoads, config: Any
) -> StackLoad:
    topology, stack = setup.layout.topology, setup.layout.stacks[name]
    rule = setup.rules[name]
    copies = 1 + (len(rule.slots()) if rule is not None else 0)
    fullest = int(loads.ids.argmax())
    most_ids, most_unique_ids = (
        int(loads.ids.max()),
        int(loads.unique_ids.max()),
    )
    capacity = config.max_ids_per_chip_per_sample * stack.samples
    pointers = topology.sparse_cores * padded_sizes(topology.shards)
    return StackLoad(
        stack=name,
        max_ids=most_ids,
        max_unique_ids=most_unique_ids,
        fullest_sparse_core=fullest,
        load=float(loads.total[fullest] / max(1e-9, loads.total.mean())),
        headroom_ids=stack.max_ids - most_ids,
        headroom_unique_ids=stack.max_unique_ids - most_unique_ids,
        table_bytes=stack.rows * stack.dim * 4 * copies // topology.chips,
        buffer_bytes=_BYTES_PER_ID * capacity + 4 * pointers,
    )
