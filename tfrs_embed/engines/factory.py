"""Makes engines by sharding type."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Mapping

from tfrs_embed.configs.placement import ShardingType
from tfrs_embed.configs.tables import FeatureSpec
from tfrs_embed.engines.composite import CompositeEngine
from tfrs_embed.engines.engine import Engine
from tfrs_embed.engines.options import EngineOptions

# The module and the class of each type, which takes `EngineOptions`. Imported
# when needed: programs without TPUs don't import SparseCores.
_ENGINES = {
    ShardingType.ONE_DEVICE: ("one_device", "OneDeviceEngine"),
    ShardingType.ROW_WISE: ("row_wise", "RowWiseEngine"),
    ShardingType.COLUMN_WISE: ("column_wise", "ColumnWiseEngine"),
    ShardingType.DATA_PARALLEL: ("data_parallel", "DataParallelEngine"),
    ShardingType.SPARSE_CORE: ("tpu.sparse_core", "SparseCoreEngine"),
    ShardingType.EMBEDDING_CORE: ("tpu.embedding_cores", "EmbeddingCoreEngine"),
    ShardingType.TPU_REPLICATED: ("tpu.replicated", "ReplicatedEngine"),
}


def make_engine(
    options: EngineOptions, sharding: Mapping[str, ShardingType]
) -> Engine:
    """Makes the engine that holds the tables of features.

    `sharding` has each table's sharding type by name; KERAS has no engine.

    Returns:
        The engine of the tables, or a composite of several: one for each
        sharding type, and others for tables with keys and in host memory.

    Raises:
        NotImplementedError: an engine doesn't support the strategy.
        ValueError: a table has more rows than an engine takes.
        RuntimeError: SparseCores without TensorFlow's wheel for TPUs.
    """
    groups: dict[tuple[ShardingType, bool, bool], list[FeatureSpec]] = {}
    for feature in options.features:
        table = feature.table
        kind = sharding[table.name], table.keys is not None, table.on_host
        groups.setdefault(kind, []).append(feature)
    engines = []
    for (each, *_), features in groups.items():
        module, name = _ENGINES[each]
        found = importlib.import_module(f"tfrs_embed.engines.{module}")
        mine = dataclasses.replace(options, features=features)
        engines.append(getattr(found, name)(mine))
    if len(engines) == 1:
        return engines[0]
    return CompositeEngine(options, engines)
