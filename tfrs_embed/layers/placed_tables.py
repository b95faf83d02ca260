"""Where a layer's tables are, and what holds them."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf

from tfrs_embed.configs import descriptions, placement
from tfrs_embed.configs.placement import Placement, ShardingType
from tfrs_embed.configs.plan_placements import with_plan
from tfrs_embed.configs.tables import EmbeddingSpec, FeatureSpec, TableSpec
from tfrs_embed.engines import factory
from tfrs_embed.engines.engine import Engine
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.layers.embedding import Embedding
from tfrs_embed.layers.table_arguments import TableArguments, convert_optimizers
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.sparsecore import stacking as stackings
from tfrs_embed.storage.initial_values import initial_blocks

if TYPE_CHECKING:
    from tfrs_embed.distribution.handshake import Facts


@dataclasses.dataclass(frozen=True)
class PlacedTables:
    """The tables of a layer and their places.

    Attributes:
        spec: the configuration, with the placements of a plan.
        placement: each table's place, for users.
        engine: holds the large tables; None: there are none.
        small: the tables that Keras layers hold.
    """

    spec: EmbeddingSpec
    placement: Placement
    engine: Engine | None
    small: list[TableSpec]


def place(
    layer: Any, spec: EmbeddingSpec, arguments: TableArguments
) -> PlacedTables:
    """Places each table of a layer, a `TableHolder`, and makes the engine.

    Raises:
        ValueError: a table can't have the placement, or the dtype there, that
            it is configured with; or a feature's activations are ragged and
            have a regularizer.
    """
    _check(layer, spec.features, arguments.invalid_ids)
    strategy, given = layer._strategy, arguments.given
    spec = with_plan(spec, arguments.plan, strategy, arguments.optimizer)
    threshold = arguments.size_threshold
    assigned = placement.assign(
        spec,
        threshold,
        strategy,
        given.get("embedding_feature"),
        layer._KERAS_TRAINS,
    )
    sharding = {name: each.sharding for name, each in assigned.items()}
    # Small tables' too: a config must be valid for any placement.
    converted = convert_optimizers(
        spec.tables, arguments.optimizer, type(layer).__name__, layer._keras
    )
    stacking = stackings.read(given.get("table_stacking", "auto"))
    if stacking is not None:
        converted = stackings.unite_optimizers(stacking, spec.tables, converted)
    small = [t for t in spec.tables if sharding[t.name] is ShardingType.KERAS]
    optimizers = {
        t.name: converted[t.name] for t in spec.tables if t not in small
    }
    untrained = arguments.optimizer is None and threshold is not None
    if small and layer.trainable and untrained:
        warnings.warn(
            f"Layer '{layer.name}': optimizer=None keeps large tables as they "
            "are, but the model's optimizer trains the small or replicated "
            f"tables {[table.name for table in small]}. trainable=False keeps "
            "all tables as they are. size_threshold=None says that the model's "
            "optimizer is to train them.",
            stacklevel=4,
        )
    engine = None
    if optimizers:
        features = [f for f in spec.features if f.table.name in optimizers]
        options = EngineOptions(
            [lookup for f in features for lookup in f.lookups],
            optimizers,
            strategy,
            f"Layer '{layer.name}'",
            pipelined=arguments.pipelined,
            device=strategy.extended.worker_devices[0]
            if tf.distribute.has_strategy()
            else None,
            batch_size=given.get("batch_size"),
            sparse_core_config=given.get("sparse_core_embedding_config"),
            stacking=stacking,
            communication_dtype=arguments.sent_as,
        )
        engine = factory.make_engine(options, sharding)
    described = placement.describe(
        spec, assigned, optimizers, arguments.sent_as
    )
    return PlacedTables(spec, described, engine, small)


def _check(
    layer: Any, features: tuple[FeatureSpec, ...], invalid_ids: str
) -> None:
    """Raises errors of a layer's arguments that don't fit the features."""
    ragged = [feature for feature in features if not feature.combined]
    if ragged and layer.activity_regularizer is not None:
        raise ValueError(
            f"{ragged[0]}: with combiner=None activations may be ragged, "
            "which Keras's activity_regularizer doesn't take: add a loss of "
            "their values to the model."
        )
    if invalid_ids == "zero" and all(map(_takes_any_key, features)):
        raise ValueError(
            f"Layer '{layer.name}': invalid_ids='zero' has no meaning for "
            f"{features[0]}: every key is valid in tables with DynamicKeys. "
            "A key that stands for padding is FeatureConfig(padding_value=...)."
        )


def _takes_any_key(feature: FeatureSpec) -> bool:
    """Whether a feature has keys, none of them padding."""
    return feature.table.keys is not None and feature.padding_value is None


def build_small(layer: Embedding, table: TableSpec) -> None:
    """Creates a small table, with the same initial rows as in an engine."""
    given = layer.embeddings_initializer

    def initializer(_: Any, dtype: Any = None, **__: Any) -> tf.Tensor:
        # Fails at once if the table is larger than all memory.
        np.empty([table.vocabulary_size, table.dim], np.float32)
        rows = tf.concat([rows for _, rows in initial_blocks(table)], 0)
        return tf.cast(rows, dtype or tf.float32)

    layer.embeddings_initializer = initializer
    try:
        layer.build(None)
    finally:
        # Keras stores it in SavedModels, which can't contain ours.
        layer.embeddings_initializer = given


def facts(layer: Any, placed: PlacedTables, arguments: TableArguments) -> Facts:
    """Returns what all workers must share: see `handshake.compare_workers`."""
    spec, engine = placed.spec, placed.engine
    optimizers: Mapping[str, TableOptimizer | None] = {}
    if engine is not None:
        optimizers = engine.optimizers
    own = {
        name: descriptions.describe(arguments.given[name])
        for name in layer._COMPARED
    }
    found: Facts = {
        "": {
            **own,
            "class": type(layer).__name__,
            "invalid_ids": arguments.invalid_ids,
            "dtype": layer.compute_dtype,
            "trainable": layer.trainable,
            "communication_dtype": arguments.sent_as,
            "tables": [t.name for t in spec.tables],
            "features": [f.name for f in spec.features],
        },
        **descriptions.of_tables(spec.tables, optimizers),
        **descriptions.of_features(spec.features),
    }
    for entry in placed.placement.tables:
        found[f"Table '{entry.table}'"]["engine"] = entry.engine
    return found
