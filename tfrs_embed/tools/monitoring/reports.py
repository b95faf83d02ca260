"""Statistics of tables, as data."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tfrs_embed.compat.text_table import format_bytes, text_table


@dataclasses.dataclass(frozen=True)
class LookupReport:
    """What batches ask of a table.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     {"movie": tfrs_embed.FeatureConfig("movie", movies)}, "sgd"
        ... )
        >>> batches = [{"movie": np.array([3, 3, 7, 9])}]
        >>> layer.statistics(batches=batches)["movies"].lookups.unique_share
        0.75

    Attributes:
        ids: ids of a batch, on average.
        unique_share: unique ids for each id, on average of the batches.
        invalid_share: the share of ids out of the table's range; of a table
            with `DynamicKeys` those of keys without a row.
        top_share: the share of the lookups that go to the top 1% of the rows:
            those that the batches ask for most, as many as are a hundredth of
            the table's rows, and one at least.
        top_shares: the same of other shares of the rows, by these.
    """

    ids: float
    unique_share: float
    invalid_share: float
    top_share: float
    top_shares: dict[float, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class KeyReport:
    """The keys of a table with `DynamicKeys`, in this process.

    Example:
        >>> layer = tfrs_embed.DynamicEmbedding(8, ["a", "b"], input_dim=100)
        >>> layer.statistics()["table"].keys.size
        2

    Attributes:
        size: keys that have rows.
        capacity: keys that there is room for now.
        admitted: keys that got rows, since the table was made.
        evicted: keys that lost theirs to others, since then.
        rejected: keys that got none, since then.
        hits: occurrences of keys that had rows already, since then.
        top_share: the share of the lookups of keys with rows that go to the top
            1% of them, by the table's own counters.
        top_shares: the same of other shares of them, by these.
    """

    size: int
    capacity: int
    admitted: int
    evicted: int
    rejected: int
    hits: int
    top_share: float
    top_shares: dict[float, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class TableReport:
    """Statistics of a table's rows that this process holds.

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
        rows: the rows that this process holds; of copies, those of one.
        dim: the width of a row.
        dtype: the rows' dtype.
        bytes: memory of these rows, with the slots of an engine.
        rows_read: how many rows were read: all, or a sample.
        norms: quantiles of the rows' Euclidean norms, by their probability.
            Rows with a NaN or an infinity are left out.
        nonfinite_rows: how many of the rows read have a NaN or an infinity.
        untouched_share: the share of rows that no update has changed yet; None:
            it isn't known.
        untouched_by: what says so: "slots", which still have their initial
            values, or "values", which have not changed since the monitor's
            first report.
        changed_share: the share of rows that changed since the last report;
            None: this is the first.
        update_norms: quantiles of the Euclidean norms of the changes since the
            last report of rows that changed, as `norms`; empty: there are none.
        idle_shares: by a number of steps, the share of rows that no update has
            changed for that many steps. For a table with `DynamicKeys` it is
            keys that no training step has seen.
        lookups: what batches ask of the table; None: there were no batches.
        keys: a table's keys that come and go; None: its rows have numbers.
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
    lookups: LookupReport | None = None
    keys: KeyReport | None = None


@dataclasses.dataclass(frozen=True)
class ReplicaReport:
    """The communication of one replica of this process.

    Example:
        >>> replica = tfrs_embed.monitoring.ReplicaReport(0, 1_000, 36_000)
        >>> replica.bytes / replica.unique_keys
        36.0

    Attributes:
        replica: its number in this process.
        unique_keys: unique keys that it looked up since the last report, or,
            in the first, since the tables were made.
        bytes: bytes that it sent since then.
    """

    replica: int
    unique_keys: int
    bytes: int


@dataclasses.dataclass(frozen=True)
class StatisticsReport(Mapping[str, TableReport]):
    """Statistics of a layer's tables; prints as a table.

    It maps tables' names to their statistics.

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
        step: the step that it is of.
        tables: the tables' statistics.
        replicas: this process's replicas, if tables are spread over several.
    """

    layer: str
    step: int
    tables: tuple[TableReport, ...]
    replicas: tuple[ReplicaReport, ...] = ()

    def __getitem__(self, table: str) -> TableReport:
        """The statistics of a table.

        Raises:
            KeyError: there is none of that name.
        """
        for each in self.tables:
            if each.table == table:
                return each
        raise KeyError(table)

    def __iter__(self) -> Iterator[str]:
        """The tables' names."""
        return (each.table for each in self.tables)

    def __len__(self) -> int:
        """The number of tables."""
        return len(self.tables)

    @property
    def imbalance(self) -> float | None:
        """Most unique keys of a replica over their mean; None: no replicas."""
        keys = [each.unique_keys for each in self.replicas]
        return max(keys) * len(keys) / sum(keys) if sum(keys) else None

    def to_dict(self) -> dict[str, Any]:
        """The statistics, JSON-able.

        Returns:
            The attributes and `imbalance`; keys of quantiles are strings.
        """
        return {**_jsonable(self), "imbalance": self.imbalance}

    def __str__(self) -> str:
        """A line for each table."""
        head = (
            *("table", "rows", "dim", "size", "median", "max", "changed"),
            *("untouched", "NaN/Inf"),
        )
        lines = [
            (
                t.table,
                f"{t.rows:,}",
                str(t.dim),
                format_bytes(t.bytes),
                f"{t.norms[0.5]:.3g}" if t.norms else "-",
                f"{t.norms[1.0]:.3g}" if t.norms else "-",
                _percent(t.changed_share),
                _percent(t.untouched_share),
                f"{t.nonfinite_rows:,}",
            )
            for t in self.tables
        ]
        return "\n".join(text_table(head, lines, {"table"}))


#: The probabilities of quantiles: 0 is the least and 1 the most.
PROBABILITIES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 1.0)


def quantiles(values: np.ndarray) -> dict[float, float]:
    """Quantiles of numbers, [n], by their probability; empty if n is 0."""
    if not values.size:
        return {}
    found = np.quantile(values, PROBABILITIES)
    return dict(zip(PROBABILITIES, map(float, found), strict=True))


def top_share(counts: np.ndarray, rows: int) -> float:
    """The share of lookups that go to the top 1% of rows.

    Args:
        counts: lookups of each row that has any, [n].
        rows: the number of all rows.
    """
    total = int(counts.sum())
    top = np.sort(counts)[::-1][: max(1, rows // 100)]
    return float(top.sum() / total) if total else 0.0


#: The shares of rows, those looked up most, of which reports have a curve.
TOP = (0.0001, 0.001, 0.01, 0.1, 0.5)


def top_shares(counts: np.ndarray, rows: int) -> dict[float, float]:
    """The shares of lookups that go to the top of the rows, as `TOP` says.

    Args:
        counts: lookups of each row that has any, [n].
        rows: the number of all rows.

    Returns:
        By the share of rows, of which one at least is meant, that of lookups;
        empty if there are no lookups.
    """
    return top_shares_of(*np.unique(counts, return_counts=True), rows)


def top_shares_of(
    lookups: np.ndarray, number: np.ndarray, rows: int
) -> dict[float, float]:
    """The same as `top_shares`, of numbers of rows.

    Args:
        lookups: different numbers of lookups of a row, ascending, [n].
        number: how many rows have each, [n].
        rows: the number of all rows.
    """
    # From the most on, how many rows and lookups there are.
    lookups, number = lookups[::-1], number[::-1]
    reached = np.concatenate([[0], np.cumsum(number)])
    made = np.concatenate([[0], np.cumsum(lookups * number)])
    if not made[-1]:
        return {}
    found = {}
    for share in TOP:
        wanted = max(1, int(rows * share))
        found[share] = float(np.interp(wanted, reached, made) / made[-1])
    return found


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _jsonable(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {
            field.name: _jsonable(getattr(value, field.name))
            for field in dataclasses.fields(value)
        }
    if isinstance(value, dict):
        return {str(key): _jsonable(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_jsonable(each) for each in value]
    return value
