"""The layout of tables on SparseCores.

TensorFlow's own code decides stacking, padding and rotation, so the layout
equals a TPU's.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import nest, tpu_embedding_v3
from tfrs_embed.sparsecore.topology import Topology

# TensorFlow 2.16 has no such name, and no layouts.
DEFAULT_LIMIT = getattr(
    tpu_embedding_v3.TPUEmbeddingV2, "DEFAULT_MAX_IDS_PER_TABLE", 256
)


@dataclasses.dataclass(frozen=True)
class FeatureLayout:
    """The places of a feature's samples and ids in a stack.

    Attributes:
        path: the path in the configuration, joined by "/".
        config: TensorFlow's FeatureConfig; its table has padded sizes.
        dim: the table's width without padding.
        samples: samples per chip: the product of output_shape.
        row_offset: the first sample among the stack's samples of a chip.
        stack: the name of the table's stack.
        col_offset: the table's first row among the stack's rows.
        col_shift: the table's rotation in shards.
    """

    path: str
    config: Any
    dim: int
    samples: int
    row_offset: int
    stack: str
    col_offset: int
    col_shift: int


@dataclasses.dataclass(frozen=True)
class StackLayout:
    """A stack: tables that SparseCores hold as one.

    Attributes:
        name: the tables' sorted names, joined by "_".
        tables: TensorFlow's TableConfigs, with padded sizes, in the stack's
            order.
        rows: padded rows of all tables, a multiple of the number of shards.
        dim: padded width.
        samples: samples per chip of all features.
        max_ids: the limit of ids that a SparseCore sends to a shard.
        max_unique_ids: the limit of unique ids among them.
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
            with a known output_shape; not changed.
        topology: the slice.
        config: a `SparseCoreEmbeddingConfig`; None: TensorFlow's defaults.

    Attributes:
        features: each feature's layout, in flattened order.
        stacks: the stacks by name, in TensorFlow's order.
        stack_of: the name of each table's stack.
        stacking: TensorFlow's description (`TableStacking`).
    """

    def __init__(
        self, feature_config: Any, topology: Topology, config: Any = None
    ) -> None:
        self.topology = topology
        if config is None:
            config = tf.tpu.experimental.embedding.SparseCoreEmbeddingConfig()
        self.config = config
        # TensorFlow pads the tables in place, so it gets a copy.
        flat = nest.flatten_with_joined_string_paths(
            tpu_embedding_v3._clone_feature_config(feature_config)
        )
        tables = list({id(f.table): f.table for _, f in flat}.values())
        dims = {table.name: table.dim for table in tables}
        stack = tpu_embedding_v3._stack_tables_with_same_table_dim_and_optimizer
        self.stacking = stacking = stack(
            tables, flat, topology.chips, topology.sparse_cores, config
        )
        max_ids = config.max_ids_per_table or {}
        max_unique = config.max_unique_ids_per_table or {}
        self.stacks = {
            name: StackLayout(
                name,
                tuple(members),
                rows=sum(t.vocabulary_size for t in members),
                dim=members[0].dim,
                samples=stacking.table_to_sample_count[name],
                # They may be tensors, of compute_sparse_core_stats.
                max_ids=int(max_ids.get(name, DEFAULT_LIMIT)),
                max_unique_ids=int(max_unique.get(name, DEFAULT_LIMIT)),
            )
            for name, members in stacking.stacked_table_to_tables.items()
        }
        self.stack_of = {
            name: where.stacked_table_name
            for name, where in stacking.table_to_layout.items()
        }
        self.features = [
            FeatureLayout(
                path,
                feature,
                dims[feature.table.name],
                math.prod(feature.output_shape),
                stacking.feature_to_sample_offset[path],
                *stacking.table_to_stacked_table_offset[feature.table.name],
            )
            for path, feature in flat
        ]


def flat_rows(layout: Any, ids: Any) -> Any:
    """The places of a table's rows, integers, in the stack's variable.

    The variable has the rows chip by chip and SparseCore by SparseCore;
    `layout` is TensorFlow's `SparseCoreTableLayout` of the table.
    """
    shards = layout.num_sparse_cores
    shard = (ids % shards + layout.sparse_core_shard_rotation) % shards
    return (
        shard * layout.total_rows_per_sparse_core_shard
        + layout.sparse_core_shard_row_offset
        + ids // shards
    )
