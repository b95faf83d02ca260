"""Engines by their kind."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence

from tfrs_embed.configs.placement import ShardingType
from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.engines.composite import CompositeEngine
from tfrs_embed.engines.engine import Engine
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.optimizers.rules import TableOptimizer

# The module and the class of each type, imported when a table needs it: a
# program without TPUs never imports SparseCores. A class takes features, the
# optimizers of their tables by name, and options.
_ENGINES = {
    ShardingType.ONE_DEVICE: ("one_device", "OneDeviceEngine"),
    ShardingType.ROW_WISE: ("row_wise", "RowWiseEngine"),
    ShardingType.COLUMN_WISE: ("column_wise", "ColumnWiseEngine"),
    ShardingType.DYNAMIC: ("dynamic", "DynamicEngine"),
    ShardingType.DYNAMIC_SHARDED: ("dynamic_sharded", "DynamicShardedEngine"),
    ShardingType.DATA_PARALLEL: ("data_parallel", "DataParallelEngine"),
    ShardingType.SPARSE_CORE: ("tpu.sparse_core", "SparseCoreEngine"),
    ShardingType.EMBEDDING_CORE: ("tpu.embedding_cores", "EmbeddingCoreEngine"),
    ShardingType.TPU_REPLICATED: ("tpu.replicated", "ReplicatedEngine"),
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
        _engine_class(each)(
            its_features,
            {f.table.name: optimizers[f.table.name] for f in its_features},
            options,
        )
        for each, its_features in by_type.items()
    ]
    if len(engines) == 1:
        return engines[0]
    return CompositeEngine(features, engines, options)


def _engine_class(sharding: ShardingType) -> Callable[..., Engine]:
    module, name = _ENGINES[sharding]
    found: Callable[..., Engine] = getattr(
        importlib.import_module(f"tfrs_embed.engines.{module}"), name
    )
    return found
