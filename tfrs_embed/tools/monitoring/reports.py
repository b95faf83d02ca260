"""Statistics of tables, as data."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfrs_embed.compat.text_table import format_bytes, value_table


@dataclasses.dataclass(frozen=True)
class LookupReport:
    """The lookups of batches in a table.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     {"movie": tfrs_embed.FeatureConfig("movie", movies)}, "sgd"
        ... )
        >>> batches = [{"movie": np.array([3, 3, 7, 9])}]
        >>> layer.statistics(batches=batches)["movies"].lookups.unique_share
        0.75

    Attributes:
        ids: the mean number of ids in a batch.
        unique_share: a batch's unique ids divided by its ids, on average.
        invalid_share: the share of ids out of the table's range, or, in a table
            with `DynamicKeys`, of keys without a row.
        top_share: the share of lookups that go to the 1% of the table's rows,
            and at least one row, that are looked up most.
        top_shares: the same for other shares of rows than 1%, by these.
        in_memory_share: of the pages of files that have the batches' rows and
            their slots, the share that was in memory before the report; None:
            the table is not in files.
    """

    ids: float
    unique_share: float
    invalid_share: float
    top_share: float
    top_shares: dict[float, float] = dataclasses.field(default_factory=dict)
    in_memory_share: float | None = None


@dataclasses.dataclass(frozen=True)
class KeyReport:
    """The keys of a table with `DynamicKeys`, in this process.

    Example:
        >>> layer = tfrs_embed.DynamicEmbedding(8, ["a", "b"], input_dim=100)
        >>> layer.statistics()["table"].keys.size
        2

    Attributes:
        size: the number of keys that have rows.
        capacity: the number of keys that the memory has room for now.
        admitted: keys that got rows since the table was made.
        evicted: keys that lost their rows to others since then.
        rejected: keys that got no row since then.
        hits: occurrences, since then, of keys that had rows already.
        top_share: the share of the lookups of keys with rows that go to the 1%
            of these keys looked up most, by the table's own counters; 0 with
            eviction="score", which counts none.
        top_shares: the same for other shares of keys than 1%, by these.
        spill: of a table with a spill, the number of "keys" in its files, the
            files' "bytes", and how many rows were "written" there and
            "returned"; None: it has none.
        text: of a table that keeps the text of its keys, the number of its
            "keys" with text and of those "unknown", and the texts' "bytes";
            None: it keeps none.
    """

    size: int
    capacity: int
    admitted: int
    evicted: int
    rejected: int
    hits: int
    top_share: float
    top_shares: dict[float, float] = dataclasses.field(default_factory=dict)
    spill: dict[str, int] | None = None
    text: dict[str, int] | None = None


@dataclasses.dataclass(frozen=True)
class FileReport:
    """The files of a table with a `FileStorage`, in this process.

    Example:
        >>> files = tfrs_embed.monitoring.FileReport(2_000_000, 100_000)
        >>> files.dirty_bytes / files.resident_bytes
        0.05

    Attributes:
        resident_bytes: bytes of the files that are in this process's memory,
            before the rows were read for the report.
        dirty_bytes: those of them that have changed and aren't written yet.
    """

    resident_bytes: int
    dirty_bytes: int


@dataclasses.dataclass(frozen=True)
class TableReport:
    """Statistics of the rows of a table that this process holds.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     {"movie": tfrs_embed.FeatureConfig("movie", movies)}, "sgd"
        ... )
        >>> report = layer.statistics()["movies"]
        >>> report.bytes, report.nonfinite_rows
        (640000, 0)

    Shares are of the rows that were read.

    Attributes:
        table: the table's name.
        rows: the number of rows in this process; a row with several copies is
            counted once.
        dim: the width of a row.
        dtype: the rows' dtype.
        bytes: the memory of these rows and of an engine's slots, or their
            files' size.
        rows_read: the number of rows that were read: all, or a sample.
        norms: quantiles of the rows' Euclidean norms, by their probability.
            Rows with a NaN or an infinity are left out.
        nonfinite_rows: the number of rows read with a NaN or an infinity.
        untouched_share: the share of rows that no update has changed yet; None:
            unknown.
        untouched_by: how this was found: "slots", which still have their
            initial values, or "values", which have not changed since the
            monitor's first report.
        changed_share: the share of rows that changed since the last report, of
            up to 10,000 rows of each shard; None: this is the first.
        update_norms: quantiles of the Euclidean norms of changes since the last
            report, as `norms`, of rows that changed; empty: there are none.
        idle_shares: by a number of steps, the share of rows that no update has
            changed for at least as many steps; in a table with `DynamicKeys`,
            the share of keys that no training step has seen for as many; empty
            if the table counts in time.
        idle_days: in a table with `DynamicKeys` that counts in time, by a
            number of days, the share of keys that no training step has seen for
            at least as many.
        lookups: the lookups of batches; None: no batches were given.
        keys: the keys of a table with `DynamicKeys`; None: its ids are rows.
        files: the files of a table with a `FileStorage`; None: it has none.
    """

    table: str
    rows: int
    dim: int
    dtype: str
    bytes: int
    rows_read: int
    norms: dict[float, float]
    nonfinite_rows: int
    untouched_share: float | None = None
    untouched_by: str | None = None
    changed_share: float | None = None
    update_norms: dict[float, float] = dataclasses.field(default_factory=dict)
    idle_shares: dict[int, float] = dataclasses.field(default_factory=dict)
    idle_days: dict[int, float] = dataclasses.field(default_factory=dict)
    lookups: LookupReport | None = None
    keys: KeyReport | None = None
    files: FileReport | None = None


@dataclasses.dataclass(frozen=True)
class ReplicaReport:
    """The communication of one replica of this process.

    Example:
        >>> replica = tfrs_embed.monitoring.ReplicaReport(0, 1_000, 36_000)
        >>> replica.bytes / replica.unique_keys
        36.0

    Attributes:
        replica: the replica's number in this process.
        unique_keys: unique keys that the replica looked up since the last
            report, or, in the first report, since the tables were made.
        bytes: bytes that the replica sent since then.
    """

    replica: int
    unique_keys: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class DiskReport:
    """This process's use of disks, by all of its files.

    The numbers are Linux's (getrusage), since the monitor's last report,
    without the reading for that report; or, in the first report, since the
    process began.

    Example:
        >>> disk = tfrs_embed.monitoring.DiskReport(100, 400_000, 800_000, 7)
        >>> disk.read_bytes / disk.steps
        4000.0

    Attributes:
        steps: the number of steps in this time.
        read_bytes: bytes read from disks.
        written_bytes: bytes to be written to disks. Linux counts a page of a
            mapped file when it changes, for the first time since it was
            written.
        page_faults: how often a thread waited for a page to be read (major page
            faults). Pages that `prefetch` has read are not among them.
    """

    steps: int
    read_bytes: int
    written_bytes: int
    page_faults: int


@dataclasses.dataclass(frozen=True)
class StatisticsReport(Mapping[str, TableReport]):
    """Statistics of a layer's tables, by the tables' names.

    It prints as a table with a line for each table.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     {"movie": tfrs_embed.FeatureConfig("movie", movies)}, "sgd"
        ... )
        >>> report = layer.statistics()
        >>> report["movies"].rows, len(report.tables)
        (20000, 1)

    Attributes:
        layer: the layer's name.
        step: the number of the step after which the tables were measured.
        tables: the tables' statistics.
        replicas: this process's replicas, if they share the tables' rows.
        disk: the process's use of disks, if a table, or what it evicts, is in
            files.
    """

    layer: str
    step: int
    tables: tuple[TableReport, ...]
    replicas: tuple[ReplicaReport, ...] = ()
    disk: DiskReport | None = None

    def __getitem__(self, table: str) -> TableReport:
        for each in self.tables:
            if each.table == table:
                return each
        raise KeyError(table)

    def __iter__(self) -> Iterator[str]:
        return (each.table for each in self.tables)

    def __len__(self) -> int:
        return len(self.tables)

    @property
    def imbalance(self) -> float | None:
        """The largest `unique_keys` over their mean; None: no replicas."""
        keys = [each.unique_keys for each in self.replicas]
        return max(keys) * len(keys) / sum(keys) if sum(keys) else None

    def to_dict(self) -> dict[str, Any]:
        """Returns the statistics as JSON has them.

        Returns:
            The attributes and `imbalance`. Keys of dicts, such as the
            probabilities of quantiles, are strings.
        """
        # JSON makes lists of tuples, and strings of keys.
        found = json.loads(json.dumps(dataclasses.asdict(self)))
        return {**found, "imbalance": self.imbalance}

    def __str__(self) -> str:
        rows = [
            {
                "table": t.table,
                "rows": t.rows,
                "dim": t.dim,
                "bytes": t.bytes,
                "median norm": t.norms.get(0.5),
                "max norm": t.norms.get(1.0),
                "changed share": t.changed_share,
                "untouched share": t.untouched_share,
                "nonfinite rows": t.nonfinite_rows,
            }
            for t in self.tables
        ]
        lines = value_table(rows)
        if self.disk is not None and self.disk.steps:
            steps, *counts = dataclasses.astuple(self.disk)
            read, written, faults = (count / steps for count in counts)
            lines.append(
                f"This process, a step: {format_bytes(read)} read and "
                f"{format_bytes(written)} to write to disks, {faults:,.1f} "
                "page faults"
            )
        return "\n".join(lines)


def flatten(record: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns nested values by their paths, such as "norms/0.5"."""
    found: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            found |= flatten(value, f"{prefix}{name}/")
        else:
            found[f"{prefix}{name}"] = value
    return found


#: The probabilities of quantiles, from the minimum to the maximum.
PROBABILITIES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)
#: The shares of rows of which `top_shares` reports the share of lookups.
TOP = (0.0001, 0.001, 0.01, 0.1, 0.5)


def quantiles(values: np.ndarray) -> dict[float, float]:
    """Returns the quantiles of numbers, [n], by probability; {} if n is 0."""
    if not values.size:
        return {}
    found = np.quantile(values, PROBABILITIES)
    return dict(zip(PROBABILITIES, map(float, found), strict=True))


def top_shares(
    lookups: np.ndarray, rows: int, number: np.ndarray | None = None
) -> dict[float, float]:
    """Returns the shares of lookups that go to the rows looked up most.

    Args:
        lookups: lookups of each row that has any, [n], in any order.
        rows: the number of all rows.
        number: how many rows have each of `lookups`, [n]; None: one.

    Returns:
        For each share of rows in `TOP`, one row at least, the share of lookups;
        empty if there are no lookups.
    """
    if number is None:
        number = np.ones_like(lookups)
    order = np.argsort(lookups)[::-1]
    lookups, number = lookups[order], number[order]
    # The numbers of rows and lookups, from the row looked up most.
    reached = np.concatenate([[0], np.cumsum(number)])
    made = np.concatenate([[0], np.cumsum(lookups * number)])
    if not made[-1]:
        return {}
    wanted = [max(1, int(rows * share)) for share in TOP]
    found = np.interp(wanted, reached, made) / made[-1]
    return dict(zip(TOP, map(float, found), strict=True))
