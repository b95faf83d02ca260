"""The layout of tables on SparseCores, by TensorFlow's rules.

Stacking, padding and rotation are decided by TensorFlow's own code, so that
they are what a TPU gets.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import nest, tpu_embedding_v3
from tfrs_embed.sparsecore.topology import Topology

# TensorFlow 2.16 names none, and has no layout to limit.
DEFAULT_LIMIT = getattr(
    tpu_embedding_v3.TPUEmbeddingV2, "DEFAULT_MAX_IDS_PER_TABLE", 256
)


@dataclasses.dataclass(frozen=True)
class FeatureLayout:
    """The places of a feature's samples and ids in its stack.

    Attributes:
        path: the feature's place in the configuration, joined by "/".
        config: TF's FeatureConfig; its table has the padded sizes.
        stack: the name of the stack its table is in.
        dim: width of the table as the user gave it.
        samples: samples of one chip: the product of output_shape.
        row_offset: of its first sample among the stack's samples of one chip.
        col_offset: of its table's first row among the stack's rows.
        col_shift: its table's rotation, in shards.
    """

    path: str
    config: Any
    stack: str
    dim: int
    samples: int
    row_offset: int
    col_offset: int
    col_shift: int


@dataclasses.dataclass(frozen=True)
class StackLayout:
    """A stack: tables that SparseCores hold as one.

    Attributes:
        name: the stack's name, its tables' sorted names joined by "_".
        tables: TF's TableConfigs, with padded sizes, in the order of the stack.
        rows: rows of all its tables, padding included; a multiple of the
            number of shards.
        dim: padded width.
        samples: samples of one chip, of all its features.
        max_ids: most ids that a SparseCore may send to one shard.
        max_unique_ids: most unique ids of them.
    """

    name: str
    tables: tuple[Any, ...]
    rows: int
    dim: int
    samples: int
    max_ids: int
    max_unique_ids: int


class Layout:
    """Tables and features on a topology.

    Args:
        feature_config: nested `tf.tpu.experimental.embedding.FeatureConfig`s
            whose output_shape is known; left as it is.
        topology: the slice.
        config: a `SparseCoreEmbeddingConfig`, or None for TF's defaults.

    Attributes:
        topology: the slice.
        config: the `SparseCoreEmbeddingConfig`.
        features: each feature's layout, in flattened order.
        stacks: the stacks by name, in TF's order.
        stack_of: the name of each table's stack.
        stacking: TF's own description (`TableStacking`).
    """

    def __init__(
        self, feature_config: Any, topology: Topology, config: Any = None
    ) -> None:
        self.topology = topology
        if config is None:
            config = tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig()
        self.config = config
        # A copy, whose tables TensorFlow pads.
        flat = nest.flatten_with_joined_string_paths(
            tpu_embedding_v3._clone_feature_config(feature_config)
        )
        tables = list({id(f.table): f.table for _, f in flat}.values())
        dims = {table.name: table.dim for table in tables}
        stacking = (
            tpu_embedding_v3._stack_tables_with_same_table_dim_and_optimizer(
                tables,
                flat,
                topology.chips,
                topology.sparse_cores,
                config,
            )
        )
        self.stacking = stacking
        max_ids = config.max_ids_per_table or {}
        max_unique = config.max_unique_ids_per_table or {}
        self.stacks = {
            name: StackLayout(
                name=name,
                tables=tuple(members),
                rows=sum(t.vocabulary_size for t in members),
                dim=members[0].dim,
                samples=stacking.table_to_sample_count[name],
                max_ids=max_ids.get(name, DEFAULT_LIMIT),
                max_unique_ids=max_unique.get(name, DEFAULT_LIMIT),
            )
            for name, members in stacking.stacked_table_to_tables.items()
        }
        self.stack_of = {
            name: where.stacked_table_name
            for name, where in stacking.table_to_layout.items()
        }
        self.features = []
        for path, feature in flat:
            stack, col_offset, col_shift = (
                stacking.table_to_stacked_table_offset[feature.table.name]
            )
            self.features.append(
                FeatureLayout(
                    path=path,
                    config=feature,
                    stack=stack,
                    dim=dims[feature.table.name],
                    samples=math.prod(feature.output_shape),
                    row_offset=stacking.feature_to_sample_offset[path],
                    col_offset=col_offset,
                    col_shift=col_shift,
                )
            )


def flat_rows(layout: Any, ids: Any) -> Any:
    """The places of a table's rows in its stack.

    Args:
        layout: TensorFlow's `SparseCoreTableLayout` of the table.
        ids: the rows' ids in the table, integers: a numpy array or a Tensor.

    Returns:
        Their places among the stack's rows, laid out chip by chip and
        SparseCore by SparseCore, as the chips' variables are end to end.
    """
    shards = layout.num_sparse_cores
    shard = (ids % shards + layout.sparse_core_shard_rotation) % shards
    return (
        shard * layout.total_rows_per_sparse_core_shard
        + layout.sparse_core_shard_row_offset
        + ids // shards
    )
