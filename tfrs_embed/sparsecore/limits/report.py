"""The report of `compute_limits`."""

from __future__ import annotations

import dataclasses

from tfrs_embed.compat import strict_json
from tfrs_embed.compat.text_table import printable, value_table


@dataclasses.dataclass(frozen=True)
class TableLoad:
    """The lookups in a table.

    Example:
        >>> load = tfrs_embed.sparsecore.TableLoad(
        ...     "movie", "movie", 20_000, 8, ids=128, unique_ids=124, share=1.0
        ... )
        >>> load.ids - load.unique_ids
        4

    Attributes:
        table: the table's name.
        stack: the name of the table's stack.
        rows: the vocabulary size.
        dim: the width of a row.
        ids: ids of all batches.
        unique_ids: unique ids of all batches.
        share: the table's fraction of the ids of all tables.
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
    """The load of a stack on the SparseCores.

    Example:
        >>> load = tfrs_embed.sparsecore.StackLoad(
        ...     "movie", 16, 16, 0, 1.0, 240, 240, 160_000, 768
        ... )
        >>> load.max_ids + load.headroom_ids  # The limit.
        256

    Attributes:
        stack: the stack's name.
        max_ids: the most ids that a SparseCore sent to one shard in a batch.
        max_unique_ids: the most unique ids among them.
        fullest_sparse_core: the shard that got `max_ids`.
        load: that shard's ids of all batches, divided by the mean of all
            shards.
        headroom_ids: the configured or default limit minus `max_ids`; below
            zero TensorFlow raises an error.
        headroom_unique_ids: the same of unique ids.
        table_bytes: bytes of tables and slots on each chip, padding included.
        buffer_bytes: bytes of buffers on each chip, with the computed limits.
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
        >>> report.batches, report.tables[0].ids, report.stacks[0].max_ids
        (2, 128, 16)
        >>> again = tfrs_embed.sparsecore.LimitsReport.from_json(
        ...     report.to_json()
        ... )
        >>> again == report
        True

    Attributes:
        topology: the name of the topology.
        batches: the number of batches.
        tables: the tables, in the order of the configuration.
        stacks: the stacks.

    Raises:
        ValueError: a table's stack is missing.
    """

    topology: str
    batches: int
    tables: tuple[TableLoad, ...]
    stacks: tuple[StackLoad, ...]

    def __post_init__(self) -> None:
        known = [stack.stack for stack in self.stacks]
        for table in self.tables:
            if table.stack not in known:
                raise ValueError(
                    f"Table '{table.table}' is in the stack '{table.stack}'; "
                    f"the report's stacks are {known}."
                )

    def to_json(self) -> str:
        """Writes all fields as JSON.

        Returns:
            The JSON, which `from_json` reads.
        """
        return strict_json.dumps(self)

    @classmethod
    def from_json(cls, text: str | bytes) -> LimitsReport:
        """Reads the result of `to_json`.

        Args:
            text: the JSON; bytes are UTF-8.

        Returns:
            The report.

        Raises:
            ValueError: the text is no JSON; a field is missing, unknown or of a
                wrong type; or a table's stack is missing.
        """
        return strict_json.loads(text, cls, "limits report")

    def __str__(self) -> str:
        # Names of stacks are long, so tables' lines have stacks' numbers.
        number = {s.stack: i for i, s in enumerate(self.stacks)}
        tables = [{**vars(t), "stack": number[t.stack]} for t in self.tables]
        stacks = [
            {**vars(s), "stack": number[s.stack], "name": s.stack}
            for s in self.stacks
        ]
        head = printable(f"{self.batches:,} batches on {self.topology}")
        return "\n".join(
            [head, "", *value_table(tables), "", *value_table(stacks)]
        )
