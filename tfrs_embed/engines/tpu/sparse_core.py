"""Tables on SparseCores, held by TensorFlow's `TPUEmbeddingV2`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.configs import FeatureSpec
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.tables.sharded import Part, ShardedVariable
from tfrs_embed.engines.tpu.base import TPUEngine
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.samples import as_ragged
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.sparsecore.coo import Ids
from tfrs_embed.sparsecore.host_kernels import require_kernels
from tfrs_embed.sparsecore.layout import Layout, flat_rows
from tfrs_embed.sparsecore.limits.loads import Loads
from tfrs_embed.sparsecore.setup import check_layout
from tfrs_embed.sparsecore.topology import of_strategy
from tfrs_embed.sparsecore.tpu_embedding import TPUEmbeddingV2InLoops


class SparseCoreEngine(TPUEngine):
    """Tables on the SparseCores of a slice (v5p, v6e).

    Pipelining is the hardware's: it takes place in a `tf.while_loop` over
    `strategy.run`, as Keras's steps_per_execution makes it.

    Raises:
        RuntimeError: this is not TensorFlow's wheel for TPUs.
    """

    def __init__(
        self,
        features: Sequence[FeatureSpec],
        optimizers: dict[str, TableOptimizer | None],
        options: EngineOptions,
    ) -> None:
        super().__init__(features, optimizers, options)
        require_kernels(options.strategy)
        self._config = options.sparse_core_config
        self._stacking = options.stacking
        self._loads: Loads | None = None
        self._topology = of_strategy(options.strategy)

    @functools.cached_property
    def _layout(self) -> Layout:
        """The tables and features on the slice; their samples are known."""
        # TensorFlow leaves out what its buffers have no room for, and limits
        # for stacks that it doesn't have.
        features = self._feature_configs(self._stacking)
        layout = Layout(features, None, self._topology, self._config)
        check_layout(layout)
        self._check_stacks(layout)
        return layout

    def raise_limits(self, bags: Sequence[BaggedIds]) -> None:
        """See the base class.

        Functions that were traced before keep the limits that they have.

        Raises:
            ValueError: the number of a feature's samples is not known.
        """
        self._require_samples()
        layout = self._layout
        self._loads = self._loads or Loads(layout)
        chips = self._topology.chips
        rows = [as_ragged(each, each.count)[0] for each in bags]
        for chip in range(chips):
            self._loads.add(
                [
                    _of_chip(of_feature, chip, chips, feature.samples)
                    for of_feature, feature in zip(
                        rows, layout.features, strict=True
                    )
                ]
            )
        if self._embedding is not None:
            config = self._with_limits(layout)
            self._embedding.max_ids_per_chip_per_sample = (
                config.max_ids_per_chip_per_sample
            )
            self._embedding._table_to_max_ids_per_sparse_core.update(
                config.max_ids_per_table
            )
            self._embedding._table_to_max_unique_ids_per_sparse_core.update(
                config.max_unique_ids_per_table
            )

    def _build(self) -> None:
        self._embedding = TPUEmbeddingV2InLoops(
            self._feature_configs(self._stacking),
            None,
            self._pipelined,
            self._with_limits(self._layout),
        )
        self._embedding.build()
        layouts = self._embedding.embedding_layouts
        for name, state in self.states.items():
            table = state.spec
            stack = layouts[name].stacked_table_name
            made = {
                key: ShardedVariable(
                    f"{name}/{key}",
                    (table.vocabulary_size, table.dim),
                    _parts(table.vocabulary_size, layouts[name], variable),
                    self._strategy,
                )
                for key, variable in self._embedding.variables[stack].items()
            }
            for start, block in self._initial_blocks(table):
                made[PARAMETERS].write_rows(start, block)
            # Only now: a checkpoint that was read before restores them.
            for key, whole in made.items():
                state.add(key, whole)

    def _check_stacks(self, layout: Layout) -> None:
        """Checks that the tables that were to be stacked are."""
        for group in self._stacking.groups if self._stacking else ():
            stacks = {
                n: layout.stack_of[n] for n in group if n in layout.stack_of
            }
            if len(set(stacks.values())) > 1:
                raise ValueError(
                    f"{self._name}: table_stacking asks for one stack of the "
                    f"tables {list(group)}, but TensorFlow puts them in "
                    f"{stacks}: one would be larger than a SparseCore takes, "
                    "or stacking is disabled by sparse_core_embedding_config."
                )

    def _with_limits(self, layout: Layout) -> Any:
        """Adds the tables' own limits for stacks that there are none for.

        What was measured raises them.
        """
        config, limits = layout.config, {}
        measured = None if self._loads is None else self._loads.config()
        for field, own in (
            ("max_ids_per_table", "max_ids_per_partition"),
            ("max_unique_ids_per_table", "max_unique_ids_per_partition"),
        ):
            given, seen = getattr(config, field), getattr(measured, field, {})
            limits[field] = {
                name: max(
                    getattr(self.states[table.name].spec, own)
                    for table in stack.tables
                )
                for name, stack in layout.stacks.items()
            } | (given or {})
            for name, most in seen.items():
                limits[field][name] = max(limits[field][name], most)
        field = "max_ids_per_chip_per_sample"
        limits[field] = max(getattr(config, field), getattr(measured, field, 0))
        return dataclasses.replace(config, **limits)

    def _padded(self) -> list[int]:
        # TensorFlow drops the samples beyond a multiple of the SparseCores.
        cores = self._topology.sparse_cores
        return [-(-samples // cores) * cores for samples in super()._padded()]

    def _read(self, name: str, ids: tf.Tensor) -> tf.Tensor:
        layout = self._embedding.embedding_layouts[name]
        stack = self._embedding.variables[layout.stacked_table_name]
        chips = stack[PARAMETERS].values
        rows = flat_rows(layout, tf.cast(ids, tf.int64))
        per_chip = chips[0].shape[0]
        chip = tf.cast(rows // per_chip, tf.int32)
        places = tf.dynamic_partition(tf.range(tf.size(ids)), chip, len(chips))
        own = tf.dynamic_partition(rows % per_chip, chip, len(chips))
        found = [tf.gather(v, r) for v, r in zip(chips, own, strict=True)]
        dim = self.states[name].spec.dim
        return tf.dynamic_stitch(places, found)[:, :dim]

    def _lookup(
        self, bags: Sequence[BaggedIds], training: bool
    ) -> tuple[list[tf.Tensor], Any, tf.Tensor]:
        ids, weights = self._ragged(bags)
        self._embedding.training = training
        vectors, buffers = self._embedding(ids, weights)
        valid = next(iter(buffers.values())).row_pointers
        return vectors, (buffers, training), valid

    def _apply_gradients(
        self, residuals: Any, gradients: Sequence[tf.Tensor]
    ) -> None:
        buffers, training = residuals
        self._embedding.training = training
        self._embedding.apply_gradients(list(gradients), buffers)


def _parts(
    rows: int, layout: Any, stack: Any
) -> list[tuple[Part, tf.Variable]]:
    """The SparseCores' rows of a table, each in its chip's variable.

    Args:
        rows: the number of the table's rows.
        layout: TensorFlow's `SparseCoreTableLayout` of the table.
        stack: the stack's variable, a replica's for each chip.
    """
    shards = layout.num_sparse_cores
    parts = []
    for first in range(min(shards, rows)):
        place = flat_rows(layout, first)
        chip, offset = divmod(place, int(stack.values[0].shape[0]))
        part = Part(range(first, rows, shards), offset=offset)
        parts.append((part, stack.values[chip]))
    return parts


def _of_chip(rows: tf.RaggedTensor, chip: int, chips: int, samples: int) -> Ids:
    """A chip's part of a global batch, padded to its samples."""
    share = -(-int(rows.nrows()) // chips)
    mine = rows[chip * share : (chip + 1) * share]
    splits = mine.row_splits.numpy()
    padding = samples + 1 - len(splits)
    return Ids(np.pad(splits, (0, padding), "edge"), mine.values.numpy())
