"""Engines by their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tfrs_embed.configs import FeatureSpec
from tfrs_embed.engines.column_wise import ColumnWiseEngine
from tfrs_embed.engines.composite import CompositeEngine
from tfrs_embed.engines.data_parallel import DataParallelEngine
from tfrs_embed.engines.dynamic import DynamicEngine
from tfrs_embed.engines.dynamic_sharded import DynamicShardedEngine
from tfrs_embed.engines.engine import Engine
from tfrs_embed.engines.one_device import OneDeviceEngine
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.row_wise import RowWiseEngine
from tfrs_embed.engines.tpu.embedding_cores import EmbeddingCoreEngine
from tfrs_embed.engines.tpu.replicated import ReplicatedEngine
from tfrs_embed.engines.tpu.sparse_core import SparseCoreEngine
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.placement import ShardingType

# Takes features, the optimizers of their tables by name, and options.
_ENGINES: dict[ShardingType, Callable[..., Engine]] = {
    ShardingType.ONE_DEVICE: OneDeviceEngine,
    ShardingType.ROW_WISE: RowWiseEngine,
    ShardingType.COLUMN_WISE: ColumnWiseEngine,
    ShardingType.DYNAMIC: DynamicEngine,
    ShardingType.DYNAMIC_SHARDED: DynamicShardedEngine,
    ShardingType.DATA_PARALLEL: DataParallelEngine,
    ShardingType.SPARSE_CORE: SparseCoreEngine,
    ShardingType.EMBEDDING_CORE: EmbeddingCoreEngine,
    ShardingType.TPU_REPLICATED: ReplicatedEngine,
}


def make_engine(
    features: Sequence[FeatureSpec],
    optimizers: Mapping[str, TableOptimizer | None],
    sharding: Mapping[str, ShardingType],
    options: EngineOptions,
) -> Engine:
    """Makes the engine that holds the tables of features.

    Args:
        features: the features to look up, in the order of each call.
        optimizers: each table's optimizer by the table's name, or None for a
            table that is not trained.
        sharding: each table's sharding type by the table's name; not KERAS,
            which is no engine.
        options: the other arguments, for all engines.

    Returns:
        The engine. Tables of several kinds have an engine for each kind,
        behind this one.

    Raises:
        NotImplementedError: an engine doesn't support the strategy.
        ValueError: a table has more rows than an engine takes.
        RuntimeError: this is not TensorFlow's wheel for TPUs, and SparseCores
            need it.
    """
    by_type: dict[ShardingType, list[FeatureSpec]] = {}
    for feature in features:
        by_type.setdefault(sharding[feature.table.name], []).append(feature)
    engines = [
        _ENGINES[each](
            its_features,
            {f.table.name: optimizers[f.table.name] for f in its_features},
            options,
        )
        for each, its_features in by_type.items()
    ]
    if len(engines) == 1:
        return engines[0]
    return CompositeEngine(features, engines, options)
