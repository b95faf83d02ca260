"""Tables on SparseCores, held by TensorFlow's `TPUEmbeddingV2`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.tpu.base import (
    TPUEngine,
    as_samples,
    new_rows,
    require_room,
)
from tfrs_embed.ops.bags import BaggedIds
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.sparsecore.host_kernels import require_kernels
from tfrs_embed.sparsecore.layout import Layout, flat_rows
from tfrs_embed.sparsecore.limits.loads import Loads, of_chips
from tfrs_embed.sparsecore.setup import check_layout
from tfrs_embed.sparsecore.topology import of_strategy
from tfrs_embed.sparsecore.tpu_embedding import TPUEmbeddingV2InLoops
from tfrs_embed.storage.sharded import Part, ShardedVariable


class SparseCoreEngine(TPUEngine):
    """Tables on the SparseCores of a slice (v5p, v6e).

    The hardware pipelines steps in a `tf.while_loop` over `strategy.run`, as
    with Keras's steps_per_execution.
    """

    def __init__(self, options: EngineOptions) -> None:
        super().__init__(options)
        require_kernels(options.strategy)
        self._config = options.sparse_core_config
        self._stacking = options.stacking
        self._topology = of_strategy(options.strategy)

    @functools.cached_property
    def _layout(self) -> Layout:
        """The layout; the features' numbers of samples must be known."""
        # TensorFlow would ignore limits for unknown stacks, and drop ids above
        # the capacity.
        features = self._feature_configs(self._stacking)
        layout = Layout(features, self._topology, self._config)
        check_layout(layout)
        for group in self._stacking or ():
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
        return layout

    @functools.cached_property
    def _loads(self) -> Loads:
        """The loads of the batches given to `raise_limits`."""
        return Loads(self._layout)

    def raise_limits(self, bags: Sequence[BaggedIds]) -> None:
        """See the base class; functions that are already traced keep limits."""
        features, chips = self._layout.features, self._topology.chips
        counts = [-(-int(each.count) // chips) for each in bags]
        require_room(self.features, counts, self._samples)
        by_feature = [
            of_chips(each, feature.samples, chips)
            for each, feature in zip(bags, features, strict=True)
        ]
        for of_chip in zip(*by_feature, strict=True):
            self._loads.add(of_chip)
        if self._embedding is not None:
            config = self._with_limits()
            self._embedding.max_ids_per_chip_per_sample = (
                config.max_ids_per_chip_per_sample
            )
            self._embedding._table_to_max_ids_per_sparse_core.update(
                config.max_ids_per_table
            )
            self._embedding._table_to_max_unique_ids_per_sparse_core.update(
                config.max_unique_ids_per_table
            )

    def _make_tables(self) -> dict[str, dict[str, Any]]:
        self._embedding = TPUEmbeddingV2InLoops(
            self._feature_configs(self._stacking),
            None,
            self._pipelined,
            self._with_limits(),
        )
        self._embedding.build()
        layouts = self._embedding.embedding_layouts
        made: dict[str, dict[str, Any]] = {}
        for name, state in self.states.items():
            table = state.spec
            stack = layouts[name].stacked_table_name
            made[name] = {
                key: ShardedVariable(
                    f"{name}/{key}",
                    (table.vocabulary_size, table.dim),
                    _parts(table.vocabulary_size, layouts[name], variable),
                    self._strategy,
                )
                for key, variable in self._embedding.variables[stack].items()
            }
            made[name][PARAMETERS].write_blocks(new_rows(table, self._strategy))
        return made

    def _with_limits(self) -> Any:
        """The config with limits for all stacks.

        The limit of a stack is the config's, or else the largest of its tables;
        measured loads raise it.
        """
        config, measured = self._layout.config, self._loads.config()

        def limits(field: str, of_table: str) -> dict[str, int]:
            given, most = getattr(config, field) or {}, getattr(measured, field)
            return {
                name: max(
                    most[name],
                    given.get(name)
                    or max(
                        getattr(self.states[table.name].spec, of_table)
                        for table in stack.tables
                    ),
                )
                for name, stack in self._layout.stacks.items()
            }

        return dataclasses.replace(
            config,
            max_ids_per_table=limits(
                "max_ids_per_table", "max_ids_per_partition"
            ),
            max_unique_ids_per_table=limits(
                "max_unique_ids_per_table", "max_unique_ids_per_partition"
            ),
            max_ids_per_chip_per_sample=max(
                config.max_ids_per_chip_per_sample,
                measured.max_ids_per_chip_per_sample,
            ),
        )

    def _padded(self) -> list[int]:
        # TensorFlow drops samples above a multiple of the SparseCores.
        cores = self._topology.sparse_cores
        return [-(-samples // cores) * cores for samples in super()._padded()]

    def _read(self, name: str, ids: tf.Tensor) -> tf.Tensor:
        layout = self._embedding.embedding_layouts[name]
        stack = self._embedding.variables[layout.stacked_table_name]
        rows = tf.compat.v1.nn.embedding_lookup(
            list(stack[PARAMETERS].values),
            flat_rows(layout, tf.cast(ids, tf.int64)),
            "div",  # Chip by chip.
        )
        return rows[:, : self.states[name].spec.dim]

    def _lookup(
        self, bags: Sequence[BaggedIds], training: bool
    ) -> tuple[list[tf.Tensor], Any, tf.Tensor]:
        ids, weights = as_samples(self.features, bags, self._padded())
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
    """Each SparseCore's rows of a table, and the variable of its chip.

    `layout` is TensorFlow's `SparseCoreTableLayout`; `stack` is the stack's
    variable, a replica's for each chip.
    """
    shards = layout.num_sparse_cores
    parts = []
    for first in range(min(shards, rows)):
        place = flat_rows(layout, first)
        chip, offset = divmod(place, int(stack.values[0].shape[0]))
        part = Part(range(first, rows, shards), offset=offset)
        parts.append((part, stack.values[chip]))
    return parts
