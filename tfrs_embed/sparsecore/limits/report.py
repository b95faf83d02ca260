"""The report of `compute_limits` on tables and SparseCores."""

from __future__ import annotations

import dataclasses

from tfrs_embed.compat import strict_json
from tfrs_embed.compat.text_table import format_bytes, text_table

_TABLE_HEAD = ("table", "rows", "dim", "ids", "unique ids", "share", "stack")
_STACK_HEAD = (
    "stack",
    "max ids",
    "max unique",
    "fullest core",
    "load",
    "headroom",
    "of unique",
    "tables/chip",
    "buffers/chip",
    "name",
)
#: Columns of text; the others are numbers.
_LEFT = ("table", "name")


@dataclasses.dataclass(frozen=True)
class TableLoad:
    """The lookups in a table.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
        >>> features = {"movie": tfrs_embed.FeatureConfig("movie", table)}
        >>> batches = [{"movie": tf.range(64)}, {"movie": tf.range(64) * 16}]
        >>> config, report = tfrs_embed.sparsecore.compute_limits(
        ...     batches, features, "v5p-8", "adagrad", progress=False
        ... )
        >>> [movie] = report.tables
        >>> movie.ids, movie.unique_ids
        (128, 124)

    Attributes:
        table: the table's name.
        stack: the name of its stack.
        rows: its vocabulary size.
        dim: the width of a row.
        ids: ids of all batches.
        unique_ids: the different ones among them.
        share: its part of the ids of all tables.
    """

    table: str
    stack: str
    rows: int
    dim: int
    ids: int
    unique_ids: int
    share: float


@dataclasses.dataclass(frozen=True)
class StackLoad:
    """The load that a stack's ids put on the SparseCores.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
        >>> features = {"movie": tfrs_embed.FeatureConfig("movie", table)}
        >>> batches = [{"movie": tf.range(64)}, {"movie": tf.range(64) * 16}]
        >>> config, report = tfrs_embed.sparsecore.compute_limits(
        ...     batches, features, "v5p-8", "adagrad", progress=False
        ... )
        >>> [stack] = report.stacks
        >>> stack.max_ids, stack.headroom_ids
        (16, 240)

    Attributes:
        stack: the stack's name.
        max_ids: most ids that a SparseCore sent to one shard in a batch.
        max_unique_ids: most different ids among them.
        fullest_sparse_core: the shard that `max_ids` was seen at.
        load: that shard's ids of all batches, over the mean of the shards.
        headroom_ids: ids left up to the limit that was configured, or is the
            default; below zero, TensorFlow would have raised an error.
        headroom_unique_ids: the same of unique ids.
        table_bytes: tables and slots on each chip, padding included.
        buffer_bytes: buffers on each chip, with the limits computed.
    """

    stack: str
    max_ids: int
    max_unique_ids: int
    fullest_sparse_core: int
    load: float
    headroom_ids: int
    headroom_unique_ids: int
    table_bytes: int
    buffer_bytes: int


@dataclasses.dataclass(frozen=True)
class LimitsReport:
    """The loads that `compute_limits` counted; prints as two tables.

    Example:
        >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
        >>> features = {"movie": tfrs_embed.FeatureConfig("movie", table)}
        >>> batches = [{"movie": tf.range(64)}, {"movie": tf.range(64) * 16}]
        >>> config, report = tfrs_embed.sparsecore.compute_limits(
        ...     batches, features, "v5p-8", "adagrad", progress=False
        ... )
        >>> report.topology, report.batches
        ('v5p-8', 2)
        >>> again = tfrs_embed.sparsecore.LimitsReport.from_json(
        ...     report.to_json()
        ... )
        >>> again == report
        True

    Attributes:
        topology: the name of the topology.
        batches: batches seen.
        tables: one entry per table, in the order of the configuration.
        stacks: one entry per stack.

    Raises:
        ValueError: a table's stack is missing.
    """

    topology: str
    batches: int
    tables: tuple[TableLoad, ...]
    stacks: tuple[StackLoad, ...]

    def __post_init__(self) -> None:
        """Checks that each table's stack is there."""
        known = [stack.stack for stack in self.stacks]
        for table in self.tables:
            if table.stack not in known:
                raise ValueError(
                    f"Table '{table.table}' is in the stack '{table.stack}'; "
                    f"the report's stacks are {known}."
                )

    def to_json(self) -> str:
        """Returns the report as JSON, with all of its fields.

        Returns:
            The JSON, which `from_json` and `tfrs-embed report` read.
        """
        return strict_json.dumps(self)

    @classmethod
    def from_json(cls, text: str) -> LimitsReport:
        """Reads what `to_json` wrote.

        Args:
            text: the JSON.

        Returns:
            The report.

        Raises:
            ValueError: it is no JSON; a field is missing, unknown or of a wrong
                type; or a table's stack is missing.
        """
        return strict_json.loads(text, cls, "limits report")

    def __str__(self) -> str:
        """The report: a line per table, a line per stack."""
        # Names of stacks are long: a table's line has its stack's number.
        number = {s.stack: str(i) for i, s in enumerate(self.stacks)}
        tables = [
            (
                t.table,
                f"{t.rows:,}",
                str(t.dim),
                f"{t.ids:,}",
                f"{t.unique_ids:,}",
                f"{t.share:.1%}",
                number[t.stack],
            )
            for t in self.tables
        ]
        stacks = [
            (
                number[s.stack],
                f"{s.max_ids:,}",
                f"{s.max_unique_ids:,}",
                str(s.fullest_sparse_core),
                f"{s.load:.2f}x",
                f"{s.headroom_ids:,}",
                f"{s.headroom_unique_ids:,}",
                format_bytes(s.table_bytes),
                format_bytes(s.buffer_bytes),
                s.stack,
            )
            for s in self.stacks
        ]
        return "\n".join(
            [
                f"{self.batches:,} batches on {self.topology}",
                "",
                *text_table(_TABLE_HEAD, tables, _LEFT),
                "",
                *text_table(_STACK_HEAD, stacks, _LEFT),
            ]
        )
