"""The choice of each table's engine, with its reason."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.compat.strategies import is_tpu
from tfrs_embed.compat.text_table import format_bytes, text_table
from tfrs_embed.configs.tables import (
    EmbeddingSpec,
    TableSpec,
    bytes_of,
    require_float32,
)
from tfrs_embed.optimizers.rules import TableOptimizer


class ShardingType(enum.Enum):
    """A way to spread tables over devices.

    The value is its name for users, and equals the `placement` of `TableConfig`
    that asks for it, if there is one.
    """

    KERAS = "Keras"
    ONE_DEVICE = "one device"
    ROW_WISE = "row"
    COLUMN_WISE = "column"
    DATA_PARALLEL = "replicated"
    SPARSE_CORE = "sparsecore"
    EMBEDDING_CORE = "TPU embedding core"
    TPU_REPLICATED = "replicated on TPU"


class Assignment(NamedTuple):
    """A table's engine, and the reason for it, for users."""

    sharding: ShardingType
    reason: str


_EmbeddingFeature = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
_ON_TPUS = {
    _EmbeddingFeature.V2: ShardingType.SPARSE_CORE,
    _EmbeddingFeature.V1: ShardingType.EMBEDDING_CORE,
    _EmbeddingFeature.UNSUPPORTED: ShardingType.TPU_REPLICATED,
}
# The engines of placements over several replicas.
_SPREAD = {
    "row": ShardingType.ROW_WISE,
    "sharded": ShardingType.ROW_WISE,
    "column": ShardingType.COLUMN_WISE,
    "table": ShardingType.COLUMN_WISE,
}
# Engines whose replicas send each other rows or gradients.
_SENDING = (
    ShardingType.ROW_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.DATA_PARALLEL,
)


@dataclasses.dataclass(frozen=True)
class TablePlacement:
    """A table's place, and the reason for it.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 64)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
        ... )
        >>> [movie] = layer.placement.tables
        >>> movie.engine, movie.reason
        ('one device', 'rows > size_threshold 10,000, one replica')

    Attributes:
        table: the table's name.
        rows: its vocabulary size.
        dim: the width of a row.
        bytes: its size with its engine's slots, without copies of hot rows.
            Slots of tables on the Keras route are in the model's optimizer, and
            not counted.
        features: the names of its features.
        engine: what holds and trains it.
        optimizer: the name of its update rule; "the model's" on the Keras
            route; "none" for a table that is not trained.
        reason: the reason for the engine.
    """

    table: str
    rows: int
    dim: int
    bytes: int
    features: tuple[str, ...]
    engine: str
    optimizer: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Placement:
    """The places of all tables of a layer; prints as a table.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 64)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
        ... )
        >>> layer.placement.total_rows
        20000

    Attributes:
        tables: one entry per table, in the configuration's order.
        communication_dtype: the dtype in which replicas send rows, vectors and
            gradients; None: nothing is sent.
        missing_kernels: why engines' tables on CPUs have no compiled kernels,
            and how to get them; None: nothing is missing. Comparisons ignore
            it, as it depends on the machine.
    """

    tables: tuple[TablePlacement, ...]
    communication_dtype: str | None = None
    missing_kernels: str | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    @property
    def total_bytes(self) -> int:
        """Size of all tables, with the counted slots."""
        return sum(t.bytes for t in self.tables)

    @property
    def total_rows(self) -> int:
        """Rows of all tables."""
        return sum(t.rows for t in self.tables)

    def __str__(self) -> str:
        left = ("table", "engine", "optimizer", "features", "reason")
        head = (left[0], "rows", "dim", "size", *left[1:])
        lines = [
            (
                t.table,
                f"{t.rows:,}",
                str(t.dim),
                format_bytes(t.bytes),
                t.engine,
                t.optimizer,
                ", ".join(t.features),
                t.reason,
            )
            for t in self.tables
        ]
        tables = f"{len(self.tables)} tables"
        features = f"{sum(len(t.features) for t in self.tables)} features"
        size = format_bytes(self.total_bytes)
        total = (tables, f"{self.total_rows:,}", "", size, "", "", features, "")
        report = text_table(head, lines, left, total)
        if self.communication_dtype not in (None, "float32"):
            report.append(
                f"Rows and gradients are sent as {self.communication_dtype}."
            )
        if self.missing_kernels is not None:
            report.append(self.missing_kernels)
        return "\n".join(report)


def assign(
    spec: EmbeddingSpec,
    size_threshold: int | None,
    strategy: tf.distribute.Strategy,
    embedding_feature: Any = None,
    keras_trains: bool = True,
) -> dict[str, Assignment]:
    """Chooses an engine for each table, by the table's name.

    Args:
        spec: the configuration.
        size_threshold: tables with more rows are large; None: none is.
        strategy: the strategy under which tables are created.
        embedding_feature: the embedding hardware to use in place of a TPU's
            own; UNSUPPORTED leaves it unused.
        keras_trains: whether small tables without an optimizer of their own are
            Keras's variables, which the model's optimizer trains. An engine
            copies other small tables to each replica.

    Raises:
        ValueError: the strategy or the TPU lacks the requested place or
            hardware, or the place has only float32 rows.
        NotImplementedError: the strategy has no engine for such tables.
    """
    tpu = _tpu_engine(strategy, embedding_feature)
    assigned = {}
    for table in spec.tables:
        sharding, reason = _assign(table, size_threshold, strategy, tpu)
        own = keras_trains and table.optimizer is not None
        if sharding is ShardingType.KERAS and (own or not keras_trains):
            sharding = ShardingType.DATA_PARALLEL
            if tpu is not None:
                sharding = ShardingType.TPU_REPLICATED
            reason += ", own optimizer" if own else ""
            leave = "; without one the model's optimizer trains it" * own
            sharding, reason = _engine(table, strategy, sharding, reason, leave)
        if sharding in _ON_TPUS.values():
            require_float32(table, f"on TPUs ({sharding.value})")
        if sharding is ShardingType.KERAS:
            # The model's optimizer would round to nearest.
            require_float32(
                table,
                f"in a Keras layer ({reason}), which the model's optimizer "
                "trains; a lower size_threshold gives the table to an engine",
            )
        assigned[table.name] = Assignment(sharding, reason)
    return assigned


def _tpu_engine(
    strategy: tf.distribute.Strategy, embedding_feature: Any
) -> ShardingType | None:
    """Returns the engine for large tables on TPUs; None without TPUs.

    Without TPUs `embedding_feature` is ignored: one configuration is for all.
    """
    if not is_tpu(strategy):
        return None
    has = strategy.extended.tpu_hardware_feature.embedding_feature
    wanted = has if embedding_feature is None else embedding_feature
    if wanted not in (has, _EmbeddingFeature.UNSUPPORTED):
        raise ValueError(
            f"embedding_feature={wanted.name}, but these TPUs have {has.name}; "
            "None takes what they have, UNSUPPORTED keeps tables replicated."
        )
    return _ON_TPUS[wanted]


def _assign(
    table: TableSpec,
    size_threshold: int | None,
    strategy: tf.distribute.Strategy,
    tpu: ShardingType | None,
) -> Assignment:
    if table.keys is not None:
        if tpu is not None:
            raise NotImplementedError(
                f"Table '{table.name}' has DynamicKeys, which TPUs don't "
                "support: train it on CPUs or GPUs."
            )
        reason = f"its keys are {table.keys.dtype.name}"
        return _engine(table, strategy, ShardingType.ROW_WISE, reason)
    if table.storage is not None and tpu is not None:
        raise NotImplementedError(
            f"Table '{table.name}' has a FileStorage, which TPUs don't "
            "support: train it on CPUs."
        )
    reason = f"placement='{table.placement}'"
    if table.placement == "sparsecore":
        if tpu is not ShardingType.SPARSE_CORE:
            raise _unavailable(table, strategy)
        return _engine(table, strategy, tpu, reason)
    if table.placement in _SPREAD:
        alone = strategy.num_replicas_in_sync == 1
        # One configuration is for a cluster and for a laptop.
        if tpu is not None or not (alone or can_shard(strategy)):
            raise _unavailable(table, strategy)
        return _engine(table, strategy, _SPREAD[table.placement], reason)
    if table.placement == "host":
        placed = _engine(table, strategy, ShardingType.ROW_WISE, reason)
        if placed.sharding is not ShardingType.ONE_DEVICE:
            raise _unavailable(table, strategy)
        return placed
    if table.storage is not None:
        sharding = ShardingType.ROW_WISE
        if table.placement in ("replicated", "default_device"):
            sharding = ShardingType.DATA_PARALLEL
        return _engine(table, strategy, sharding, "it has a FileStorage")
    if table.placement in ("replicated", "default_device"):
        return Assignment(ShardingType.KERAS, reason)
    if size_threshold is None:
        return Assignment(ShardingType.KERAS, "size_threshold is None")
    threshold = f"size_threshold {size_threshold:,}"
    if table.vocabulary_size <= size_threshold:
        return Assignment(ShardingType.KERAS, f"rows <= {threshold}")
    reason = f"rows > {threshold}"
    keras = "; size_threshold=None keeps all tables in Keras layers"
    return _engine(table, strategy, tpu or ShardingType.ROW_WISE, reason, keras)


def _unavailable(
    table: TableSpec, strategy: tf.distribute.Strategy
) -> ValueError:
    return ValueError(
        f"Table '{table.name}': placement='{table.placement}' is not available "
        f"under {type(strategy).__name__} of {strategy.num_replicas_in_sync} "
        "replicas."
    )


def _engine(
    table: TableSpec,
    strategy: tf.distribute.Strategy,
    sharding: ShardingType,
    reason: str,
    instead: str = "",
) -> Assignment:
    """Returns a table's engine on several replicas, or on the only one.

    `reason` says why the table needs an engine; `instead` ends the error under
    a strategy without one.
    """
    replicas = strategy.num_replicas_in_sync
    if is_tpu(strategy) or can_shard(strategy):
        reason = f"{reason}, {replicas} replicas"
        if sharding is ShardingType.ROW_WISE and isinstance(
            table.hot_rows, tuple
        ):
            hot = len(table.hot_rows)
            reason += f", copies of {hot:,} hot rows" if hot else ""
        return Assignment(sharding, reason)
    servers = tf.distribute.experimental.ParameterServerStrategy
    if replicas > 1 or isinstance(strategy, servers):
        raise NotImplementedError(
            f"Table '{table.name}': {reason}, but tables with optimizers of "
            "their own need one replica, a MirroredStrategy or a "
            "MultiWorkerMirroredStrategy, and are not supported under "
            f"{type(strategy).__name__}{instead}."
        )
    return Assignment(ShardingType.ONE_DEVICE, f"{reason}, one replica")


def can_shard(strategy: tf.distribute.Strategy) -> bool:
    """Whether tables can be sharded over a strategy's replicas."""
    kinds = (
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
    )
    return isinstance(strategy, kinds) and strategy.num_replicas_in_sync > 1


def describe(
    spec: EmbeddingSpec,
    assigned: Mapping[str, Assignment],
    optimizers: Mapping[str, TableOptimizer | None],
    communication_dtype: str = "float32",
) -> Placement:
    """Describes the places of tables that `assign` chose.

    `optimizers` are those of engines' tables; `communication_dtype` is used
    only if replicas send rows.
    """
    entries = []
    for table in spec.tables:
        sharding, reason = assigned[table.name]
        optimizer = optimizers.get(table.name)
        numbers = 0
        if optimizer is not None:
            numbers = optimizer.rule.numbers_per_row(table.dim)
        if sharding is ShardingType.KERAS:
            trained_by = "the model's"
        else:
            trained_by = "none" if optimizer is None else str(optimizer)
        entries.append(
            TablePlacement(
                table=table.name,
                rows=table.num_rows,
                dim=table.dim,
                bytes=table.num_rows
                * (table.dim * bytes_of(table) + numbers * tf.float32.size),
                features=tuple(
                    f.name for f in spec.features if f.table is table
                ),
                engine=_engine_name(table, sharding),
                optimizer=trained_by,
                reason=reason,
            )
        )
    sends = any(each.sharding in _SENDING for each in assigned.values())
    return Placement(tuple(entries), communication_dtype if sends else None)


def _engine_name(table: TableSpec, sharding: ShardingType) -> str:
    """Returns where a table's rows are and what holds them, for users."""
    if sharding is ShardingType.ONE_DEVICE and table.on_host:
        return "host"
    if sharding is ShardingType.COLUMN_WISE and table.placement == "table":
        return "table"
    return f"{sharding.value}{', by key' * (table.keys is not None)}"
