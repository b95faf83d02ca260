"""Plans: a placement for each table, and the predicted cost of a step."""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, Literal, get_args

from tfrs_embed.compat import strict_json
from tfrs_embed.compat.arguments import choice
from tfrs_embed.compat.text_table import format_bytes, printable, value_table
from tfrs_embed.configs.hardware import Hardware
from tfrs_embed.configs.tables import as_hot_rows
from tfrs_embed.configs.types import CommunicationDtype

#: Rows on all replicas, a table on one, columns on some, a copy on each.
PlacementName = Literal["row", "table", "column", "replicated"]
PLACEMENTS: tuple[str, ...] = get_args(PlacementName)

# Reports of more replicas have the least, the mean and the most.
_MOST_REPLICAS = 16


@dataclasses.dataclass(frozen=True)
class TablePlan:
    """A table's placement, and the reason for it.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 64)
        >>> plan = tfrs_embed.plan(
        ...     tfrs_embed.FeatureConfig("movie", movies),
        ...     1,
        ...     replicas=8,
        ...     batch_size=1024,
        ...     optimizer="adagrad",
        ... )
        >>> [table] = plan.tables
        >>> table.placement, table.bytes
        ('replicated', 10240000)

    Attributes:
        table: the table's name.
        rows: the vocabulary size.
        dim: the width of a row.
        bytes: the size with the optimizer's slots.
        features: the names of the table's features.
        hotness: ids of a sample, of all features.
        unique_share: unique ids over ids, in one replica's part of a batch.
        placement: "row": row i is on rank i modulo the number of replicas;
            "table": the table is on one rank; "column": columns are divided
            among ranks; "replicated": each replica has a copy.
        ranks: for "table" the rank; for "column" the rank of each slice, in the
            order of the columns; else ().
        reason: the reason for the placement.
        optimizer: the update rule of the plan, such as "Adagrad"; "none": no
            optimizer was given, and no slots were counted.
        dtype: the dtype of the rows.
        hot_rows: for "row" the ids of the rows that each replica has a copy of.
        in_files: whether the table is in files.

    Raises:
        ValueError: placement and ranks don't go together.
    """

    table: str
    rows: int
    dim: int
    bytes: int
    features: tuple[str, ...]
    hotness: float
    unique_share: float
    placement: PlacementName
    ranks: tuple[int, ...]
    reason: str
    optimizer: str
    dtype: str
    hot_rows: tuple[int, ...] = ()
    in_files: bool = False

    def __post_init__(self) -> None:
        """Checks that placement and ranks go together."""
        where = f"Table '{self.table}'"
        choice(self.placement, PLACEMENTS, f"{where}: placement")
        slices = len(self.ranks)
        numbers = {"table": range(1, 2), "column": range(2, self.dim + 1)}
        if (
            slices not in numbers.get(self.placement, [0])
            or (slices and self.dim % slices)
            or len(set(self.ranks)) < slices
        ):
            raise ValueError(
                f"{where}: placement='{self.placement}' of {self.dim} columns "
                f"can't have the ranks {list(self.ranks)}."
            )
        if self.hot_rows and self.placement != "row":
            raise ValueError(
                f"{where}: placement='{self.placement}' can't have hot_rows."
            )
        hot_rows = as_hot_rows(self.hot_rows, self.rows, where)
        object.__setattr__(self, "hot_rows", hot_rows)

    def __str__(self) -> str:
        """Returns the placement, with its ranks if they are few."""
        if self.hot_rows:
            return f"row, {len(self.hot_rows):,} hot"
        if not self.ranks:
            return self.placement
        if self.placement == "table":
            return f"table, rank {self.ranks[0]}"
        if len(self.ranks) > 4:
            return f"column, {len(self.ranks)} ranks"
        return f"column, ranks {', '.join(map(str, self.ranks))}"


@dataclasses.dataclass(frozen=True)
class ReplicaPlan:
    """One replica's share of a plan.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 64)
        >>> plan = tfrs_embed.plan(
        ...     tfrs_embed.FeatureConfig("movie", movies),
        ...     1,
        ...     replicas=8,
        ...     batch_size=1024,
        ... )
        >>> plan.per_replica[3].bytes
        5120000

    Attributes:
        rank: the replica's rank.
        bytes: bytes of the replica's tables and slots in memory.
        sent_bytes: bytes sent to other replicas in a training step.
        lookups: rows, and slices of rows, read in a training step.
    """

    rank: int
    bytes: int
    sent_bytes: int
    lookups: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A placement for each table; prints as a report.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 64)
        >>> plan = tfrs_embed.plan(
        ...     tfrs_embed.FeatureConfig("movie", movies),
        ...     1,
        ...     replicas=8,
        ...     batch_size=1024,
        ... )
        >>> tfrs_embed.Plan.from_json(plan.to_json()) == plan
        True

    Attributes:
        replicas: the number of replicas.
        hardware: the replicas' hardware.
        memory_per_replica: bytes of tables and slots that a replica may hold;
            None: there is no limit.
        batch_size: the mean number of samples of a replica.
        tables: each table's placement, in the order of the configuration.
        per_replica: each replica's share, by rank.
        seconds: the predicted time of a training step's work on the tables.
        sent_bytes: bytes that a replica sends in a training step.
        collectives: the number of collectives of a training step.
        imbalance: the most work of a replica, over the mean.
        communication_dtype: the dtype that rows, vectors and gradients are sent
            as.

    Raises:
        ValueError: fields contradict each other.
    """

    replicas: int
    hardware: Hardware
    memory_per_replica: int | None
    batch_size: float
    tables: tuple[TablePlan, ...]
    per_replica: tuple[ReplicaPlan, ...]
    seconds: float
    sent_bytes: int
    collectives: int
    imbalance: float
    communication_dtype: CommunicationDtype = "float32"

    def __post_init__(self) -> None:
        """Checks that the parts are of one plan."""
        ranks = [replica.rank for replica in self.per_replica]
        if self.replicas < 1 or ranks != list(range(self.replicas)):
            raise ValueError(
                f"A plan for {self.replicas} replicas must have one entry for "
                f"each in per_replica, by rank, got {len(ranks)}."
            )
        names = [table.table for table in self.tables]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"A plan's tables must have different names, got {names}."
            )
        for table in self.tables:
            for rank in table.ranks:
                if not 0 <= rank < self.replicas:
                    raise ValueError(
                        f"Table '{table.table}': rank {rank} is not in [0, "
                        f"{self.replicas}), the plan's replicas."
                    )

    @property
    def total_bytes(self) -> int:
        """The bytes of all tables and slots, each counted once."""
        return sum(table.bytes for table in self.tables)

    def to_json(self) -> str:
        """Writes the plan as JSON.

        Returns:
            The JSON, which `from_json` reads.
        """
        return strict_json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> Plan:
        """Reads a plan that `to_json` wrote.

        Args:
            text: the JSON; bytes are UTF-8.

        Returns:
            The plan.

        Raises:
            ValueError: `text` is no JSON; a field is missing, unknown or of a
                wrong type; or fields contradict each other.
        """
        return strict_json.loads(text, cls, "plan")

    def __str__(self) -> str:
        """Returns the report: totals, tables, replicas."""
        parts = (_table_rows(self), _replica_rows(self))
        lines = [line for rows in parts for line in ("", *value_table(rows))]
        return "\n".join([*map(printable, _summary(self)), *lines])


def _summary(plan: Plan) -> list[str]:
    """Returns a plan's totals, as two lines of text."""
    limit = plan.memory_per_replica
    memory = "no limit" if limit is None else f"up to {format_bytes(limit)}"
    tables = (
        "1 table" if len(plan.tables) == 1 else f"{len(plan.tables)} tables"
    )
    plural = "" if plan.replicas == 1 else "s"
    sent_as = ""
    if plan.communication_dtype != "float32":
        sent_as = f" as {plan.communication_dtype}"
    return [
        f"Plan of {tables} ({format_bytes(plan.total_bytes)}) for "
        f"{plan.replicas:,} replica{plural} of {plan.hardware.name}, "
        f"{plan.batch_size:,.6g} samples each, {memory} of tables each",
        f"Predicted step: {format_seconds(plan.seconds)}, "
        f"{format_bytes(plan.sent_bytes)} sent per replica{sent_as}, "
        f"{plan.collectives} collectives, imbalance {plan.imbalance:.2f}",
    ]


def _table_rows(plan: Plan) -> list[dict[str, Any]]:
    return [
        {
            "table": t.table,
            "rows": t.rows,
            "dim": t.dim,
            "bytes": t.bytes,
            "hotness": t.hotness,
            "unique share": t.unique_share,
            "placement": f"{t}, in files" if t.in_files else str(t),
            "reason": t.reason,
        }
        for t in plan.tables
    ]


def _replica_rows(plan: Plan) -> list[dict[str, Any]]:
    """Returns a row for each replica; of many, the least, mean and most."""
    rows: list[dict[str, Any]] = [
        {
            "replica": str(r.rank),
            "bytes": r.bytes,
            "sent bytes": r.sent_bytes,
            "lookups": round(r.lookups),
        }
        for r in plan.per_replica
    ]
    if len(rows) <= _MOST_REPLICAS:
        return rows
    kinds: dict[str, Any] = {
        "least": min,
        "mean": statistics.fmean,
        "most": max,
    }
    return [
        {"replica": name}
        | {c: kind([r[c] for r in rows]) for c in list(rows[0])[1:]}
        for name, kind in kinds.items()
    ]


def format_seconds(seconds: float) -> str:
    """Returns a time in the unit that suits it, e.g. "1.25 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"
