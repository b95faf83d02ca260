"""The choice of an engine for each table, and its reason."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.configs import (
    EmbeddingSpec,
    TableSpec,
    bytes_of,
    require_float32,
)
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.strategies import is_tpu
from tfrs_embed.text_table import format_bytes, text_table


class EngineKind(enum.Enum):
    """A way to hold and train tables; the value is its name for users."""

    KERAS = "Keras"
    ONE_DEVICE = "one device"
    SHARDED = "sharded"
    COLUMNS = "by column"
    DYNAMIC = "one device, by key"
    DYNAMIC_SHARDED = "sharded, by key"
    MIRRORED = "mirrored"
    SPARSE_CORE = "SparseCore"
    EMBEDDING_CORE = "TPU embedding core"
    TPU_REPLICATED = "replicated on TPU"


class TableRoute(NamedTuple):
    """The engine that is chosen for a table.

    Attributes:
        kind: the engine.
        reason: why it is chosen, for users.
    """

    kind: EngineKind
    reason: str


_ON_TPUS = (
    EngineKind.SPARSE_CORE,
    EngineKind.EMBEDDING_CORE,
    EngineKind.TPU_REPLICATED,
)
_EmbeddingFeature = tf.tpu.experimental.HardwareFeature.EmbeddingFeature
_BY_FEATURE = {
    _EmbeddingFeature.V2: EngineKind.SPARSE_CORE,
    _EmbeddingFeature.V1: EngineKind.EMBEDDING_CORE,
    _EmbeddingFeature.UNSUPPORTED: EngineKind.TPU_REPLICATED,
}
# The engines of placements over several replicas.
_SPREAD = {
    "row": EngineKind.SHARDED,
    "sharded": EngineKind.SHARDED,
    "column": EngineKind.COLUMNS,
    "table": EngineKind.COLUMNS,
}
# Those whose replicas send each other rows or gradients.
_SENDING = (
    EngineKind.SHARDED,
    EngineKind.COLUMNS,
    EngineKind.DYNAMIC_SHARDED,
    EngineKind.MIRRORED,
)


@dataclasses.dataclass(frozen=True)
class TablePlacement:
    """The place of a table, and the reason for it.

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
        bytes: its size with the slots that its engine holds. A table on the
            Keras route has its slots in the model's optimizer; they are not
            counted. Nor are copies of hot rows.
        features: the names of the features that are looked up in it.
        engine: what holds and trains it.
        optimizer: the name of its update rule, "the model's" on the Keras
            route, "none" for a table that is not trained.
        reason: why it is there.
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
        tables: one entry per table, in the order of the configuration.
        communication_dtype: what rows, vectors and gradients are sent as
            between replicas; None: engines send none.
        missing_kernels: why engines' tables on CPUs do without compiled
            kernels, and how to get these; None: nothing is missing. It is of
            the machine and not of the places, so two that differ in it alone
            are equal.
    """

    tables: tuple[TablePlacement, ...]
    communication_dtype: str | None = None
    missing_kernels: str | None = dataclasses.field(
        default=None, repr=False, compare=False
    )

    @property
    def total_bytes(self) -> int:
        """Size of all tables, with the slots counted."""
        return sum(t.bytes for t in self.tables)

    @property
    def total_rows(self) -> int:
        """Rows of all tables."""
        return sum(t.rows for t in self.tables)

    def __str__(self) -> str:
        """The report: a line per table, totals, what is sent and missing."""
        head = (
            "table",
            "rows",
            "dim",
            "size",
            "engine",
            "optimizer",
            "features",
            "reason",
        )
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
        features = sum(len(t.features) for t in self.tables)
        total = (
            f"{len(self.tables)} tables",
            f"{self.total_rows:,}",
            "",
            format_bytes(self.total_bytes),
            "",
            "",
            f"{features} features",
            "",
        )
        left = ("table", "engine", "optimizer", "features", "reason")
        report = text_table(head, lines, left, total)
        if self.communication_dtype not in (None, "float32"):
            report.append(
                f"Rows and gradients are sent as {self.communication_dtype}."
            )
        if self.missing_kernels is not None:
            report.append(self.missing_kernels)
        return "\n".join(report)


def route(
    spec: EmbeddingSpec,
    size_threshold: int | None,
    strategy: tf.distribute.Strategy,
    embedding_feature: Any = None,
) -> dict[str, TableRoute]:
    """Chooses an engine for each table.

    Args:
        spec: the configuration.
        size_threshold: tables with more rows are large; None: none is.
        strategy: the strategy the tables are created under.
        embedding_feature: a TPU's embedding hardware to use instead of what it
            reports: UNSUPPORTED leaves it unused.

    Returns:
        Each table's route, by its name.

    Raises:
        ValueError: a table asks for a place that the strategy doesn't have, or
            the TPU doesn't have the embedding hardware.
        NotImplementedError: large tables under a strategy that has no engine
            for them.
    """
    tpu = _tpu_engine(strategy, embedding_feature)
    return {
        table.name: _route(table, size_threshold, strategy, tpu)
        for table in spec.tables
    }


def require_dtypes(
    spec: EmbeddingSpec, routes: Mapping[str, TableRoute]
) -> None:
    """Requires that tables of other dtypes than float32 can be where they are.

    Keras layers' tables can't: the model's optimizer trains those, and rounds
    to the nearest. Nor can those on TPUs.

    Args:
        spec: the configuration.
        routes: each table's route, by its name.

    Raises:
        ValueError: one of them is such a table.
    """
    for table in spec.tables:
        kind, reason = routes[table.name]
        if kind in _ON_TPUS:
            require_float32(table, f"on TPUs ({kind.value})")
        if kind is EngineKind.KERAS:
            require_float32(
                table,
                f"in a Keras layer ({reason}), which the model's optimizer "
                "trains; a lower size_threshold gives the table to an engine",
            )


def route_to_engines(
    spec: EmbeddingSpec,
    size_threshold: int | None,
    strategy: tf.distribute.Strategy,
    embedding_feature: Any = None,
) -> dict[str, TableRoute]:
    """The same for tables that their own optimizers train, small ones too.

    What `route` leaves to Keras layers goes to an engine of the default
    device: a copy on each replica, if there are several.

    Args:
        spec: the configuration.
        size_threshold: see `route`.
        strategy: see `route`.
        embedding_feature: see `route`.

    Returns:
        See `route`.

    Raises:
        ValueError: see `route`.
        NotImplementedError: the strategy has no engine for such tables.
    """
    routes = route(spec, size_threshold, strategy, embedding_feature)
    for table, (kind, reason) in routes.items():
        if kind is EngineKind.KERAS:
            routes[table] = _default_device(table, strategy, reason)
    return routes


def _default_device(
    table: str, strategy: tf.distribute.Strategy, reason: str
) -> TableRoute:
    replicas = f"{reason}, {strategy.num_replicas_in_sync} replicas"
    if is_tpu(strategy):
        return TableRoute(EngineKind.TPU_REPLICATED, replicas)
    if can_shard(strategy):
        return TableRoute(EngineKind.MIRRORED, replicas)
    _require_one_device(table, strategy, reason, "")
    return TableRoute(EngineKind.ONE_DEVICE, f"{reason}, one replica")


def _tpu_engine(
    strategy: tf.distribute.Strategy, embedding_feature: Any
) -> EngineKind | None:
    """The engine for large tables on a strategy's TPUs; None: there are none.

    `embedding_feature` is read on TPUs only: one configuration is for all.
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
    return _BY_FEATURE[wanted]


def _route(
    table: TableSpec,
    size_threshold: int | None,
    strategy: tf.distribute.Strategy,
    tpu: EngineKind | None,
) -> TableRoute:
    if table.keys is not None:
        return _route_keys(table, strategy)
    replicas = f"{strategy.num_replicas_in_sync} replicas"
    wanted = f"placement='{table.placement}'"
    if table.placement == "sparsecore":
        if tpu is not EngineKind.SPARSE_CORE:
            raise _unavailable(table, strategy)
        return TableRoute(EngineKind.SPARSE_CORE, f"{wanted}, {replicas}")
    if table.placement in _SPREAD:
        if can_shard(strategy):
            reason = f"{wanted}, {replicas}{_hot_rows(table)}"
            return TableRoute(_SPREAD[table.placement], reason)
        if is_tpu(strategy) or strategy.num_replicas_in_sync > 1:
            raise _unavailable(table, strategy)
        # One configuration is for a cluster and for a laptop.
        _require_one_device(table.name, strategy, wanted, "")
        return TableRoute(EngineKind.ONE_DEVICE, f"{wanted}, one replica")
    if table.placement in ("replicated", "default_device"):
        return TableRoute(EngineKind.KERAS, wanted)
    if size_threshold is None:
        return TableRoute(EngineKind.KERAS, "size_threshold is None")
    if table.vocabulary_size <= size_threshold:
        return TableRoute(
            EngineKind.KERAS, f"rows <= size_threshold {size_threshold:,}"
        )
    reason = f"rows > size_threshold {size_threshold:,}"
    if tpu is not None:
        return TableRoute(tpu, f"{reason}, {replicas}")
    if can_shard(strategy):
        reason = f"{reason}, {replicas}{_hot_rows(table)}"
        return TableRoute(EngineKind.SHARDED, reason)
    keras = "; size_threshold=None keeps all tables in Keras layers"
    _require_one_device(table.name, strategy, reason, keras)
    return TableRoute(EngineKind.ONE_DEVICE, f"{reason}, one replica")


def _hot_rows(table: TableSpec) -> str:
    if not isinstance(table.hot_rows, tuple) or not table.hot_rows:
        return ""
    return f", copies of {len(table.hot_rows):,} hot rows"


def _unavailable(
    table: TableSpec, strategy: tf.distribute.Strategy
) -> ValueError:
    return ValueError(
        f"Table '{table.name}': placement='{table.placement}' is not available "
        f"under {type(strategy).__name__}."
    )


def _route_keys(
    table: TableSpec, strategy: tf.distribute.Strategy
) -> TableRoute:
    """The route of a table with `DynamicKeys`, which is always large."""
    reason = f"its keys are {table.keys.dtype.name}"  # type: ignore[union-attr]
    if is_tpu(strategy):
        raise NotImplementedError(
            f"Table '{table.name}' has DynamicKeys, and tables on TPUs have a "
            "row for each number of a vocabulary: train it on CPUs or GPUs."
        )
    if can_shard(strategy):
        replicas = f"{strategy.num_replicas_in_sync} replicas"
        return TableRoute(EngineKind.DYNAMIC_SHARDED, f"{reason}, {replicas}")
    _require_one_device(table.name, strategy, reason, "")
    return TableRoute(EngineKind.DYNAMIC, f"{reason}, one replica")


def _require_one_device(
    table: str, strategy: tf.distribute.Strategy, reason: str, instead: str
) -> None:
    """Requires a strategy of one replica, as `can_shard` said no.

    Args:
        table: the table's name.
        strategy: the strategy.
        reason: why the table needs an engine.
        instead: what else could be done.

    Raises:
        NotImplementedError: it isn't.
    """
    if isinstance(strategy, tf.distribute.experimental.ParameterServerStrategy):
        raise NotImplementedError(
            f"Table '{table}': {reason}, but tables with optimizers of their "
            f"own are not supported under ParameterServerStrategy{instead}."
        )
    if strategy.num_replicas_in_sync > 1:
        raise NotImplementedError(
            f"Table '{table}': {reason}, but tables with optimizers of their "
            "own need a MirroredStrategy or a MultiWorkerMirroredStrategy on "
            f"several replicas, not {type(strategy).__name__}{instead}."
        )


def can_shard(strategy: tf.distribute.Strategy) -> bool:
    """Whether tables can be sharded over a strategy's replicas."""
    kinds = (
        tf.distribute.MirroredStrategy,
        tf.distribute.MultiWorkerMirroredStrategy,
    )
    return isinstance(strategy, kinds) and strategy.num_replicas_in_sync > 1


def describe(
    spec: EmbeddingSpec,
    routes: Mapping[str, TableRoute],
    optimizers: dict[str, TableOptimizer | None],
    communication_dtype: str = "float32",
) -> Placement:
    """Describes where tables are.

    Args:
        spec: the configuration.
        routes: each table's route, by its name.
        optimizers: the optimizers of tables that engines hold, by name.
        communication_dtype: what is sent between replicas, if anything is.

    Returns:
        The description.
    """
    entries = []
    for table in spec.tables:
        kind, reason = routes[table.name]
        optimizer = optimizers.get(table.name)
        numbers = 0
        if optimizer is not None:
            numbers = optimizer.rule.numbers_per_row(table.dim)
        if kind is EngineKind.KERAS:
            trained_by = "the model's"
        else:
            trained_by = "none" if optimizer is None else str(optimizer)
        entries.append(
            TablePlacement(
                table=table.name,
                rows=table.vocabulary_size,
                dim=table.dim,
                bytes=table.vocabulary_size
                * (table.dim * bytes_of(table) + numbers * tf.float32.size),
                features=tuple(
                    f.name for f in spec.features if f.table is table
                ),
                engine=kind.value,
                optimizer=trained_by,
                reason=reason,
            )
        )
    sends = any(each.kind in _SENDING for each in routes.values())
    return Placement(tuple(entries), communication_dtype if sends else None)
