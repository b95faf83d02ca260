"""A statistics log, with the reports of all workers as one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from tfrs_embed.tools.monitoring.log import FILE, read_workers
from tfrs_embed.tools.monitoring.reports import (
    ReplicaReport,
    StatisticsReport,
    TableReport,
    from_dict,
)


@dataclasses.dataclass(frozen=True)
class Log:
    """A log.

    Attributes:
        workers: the number of workers that wrote it.
        tables: by a table's name, with its layer's if there are several, its
            reports by step, ascending.
        replicas: by a replica's name, its last report that isn't zero.
        imbalance: by layer, the first worker's `imbalance` by step.
    """

    workers: int
    tables: Mapping[str, Mapping[int, TableReport]]
    replicas: Mapping[str, ReplicaReport]
    imbalance: Mapping[str, Mapping[int, float]]

    def last(self) -> dict[str, TableReport]:
        """Returns each table's last report."""
        return {name: list(t.values())[-1] for name, t in self.tables.items()}


def read(folder: str) -> Log:
    """Reads the log in a folder.

    Raises:
        OSError: it can't be read.
        ValueError: it has no reports, or other lines.
    """
    workers = read_workers(folder)
    try:
        log = _combine([[from_dict(x) for x in worker] for worker in workers])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"'{folder}': a line of {FILE} is not a report of "
            f"tfrs_embed.monitoring: {type(error).__name__} {error}."
        ) from None
    if not log.tables:
        raise ValueError(f"'{folder}': {FILE} has no reports of tables yet.")
    return log


def _combine(workers: Sequence[Sequence[StatisticsReport]]) -> Log:
    # By layer and table, by step, by worker.
    found: dict[tuple[str, str], dict[int, dict[int, TableReport]]] = {}
    imbalance: dict[str, dict[int, float]] = {}
    replicas: dict[str, ReplicaReport] = {}
    for worker, reports in enumerate(workers):
        for report in reports:
            layer, step = report.layer, report.step
            for table in report.tables:
                # A step that was trained again replaces the earlier one.
                steps = found.setdefault((layer, table.table), {})
                steps.setdefault(step, {})[worker] = table
            if report.imbalance is not None and not worker:
                imbalance.setdefault(layer, {})[step] = report.imbalance
            for each in report.replicas:
                name = f"{layer}: replica {each.replica}"
                if len(workers) > 1:
                    name += f" of worker {worker}"
                if each.unique_keys or each.bytes:
                    replicas[name] = each
    one_layer = len({layer for layer, _ in found}) == 1
    tables = {
        table if one_layer else f"{layer}/{table}": {
            step: _merge_tables(list(steps[step].values()))
            for step in sorted(steps)
        }
        for (layer, table), steps in found.items()
    }
    return Log(len(workers), tables, replicas, imbalance)


# Fields that are added; the text and width of a table are those of any worker.
_ADDED = (
    *("rows", "bytes", "rows_read", "nonfinite_rows", "size", "capacity"),
    *("admitted", "evicted", "rejected", "hits"),
)
_ALIKE = ("table", "dim", "dtype", "untouched_by")


def _merge_tables(parts: Sequence[TableReport]) -> TableReport:
    merged: TableReport = _merge(parts, [part.rows_read for part in parts])
    return merged


def _merge(parts: Sequence[Any], weights: Sequence[float]) -> Any:
    """Merges the workers' reports of a table, its lookups or its keys.

    Shares and quantiles are means by the workers' weights.
    """
    merged: dict[str, Any] = {}
    for name in vars(parts[0]):
        pairs = [
            (value, weight)
            for part, weight in zip(parts, weights, strict=True)
            if (value := getattr(part, name)) is not None
        ]
        found = [value for value, _ in pairs]
        if not found:
            merged[name] = None
        elif name in _ALIKE:
            merged[name] = found[0]
        elif name in _ADDED:
            merged[name] = sum(found)
        elif name == "lookups":
            merged[name] = _merge(found, [1.0] * len(found))
        elif name == "keys":
            merged[name] = _merge(found, [keys.size for keys in found])
        elif isinstance(found[0], Mapping):
            keys = dict.fromkeys(key for each in found for key in each)
            means = {k: _mean([(v.get(k), w) for v, w in pairs]) for k in keys}
            merged[name] = {k: m for k, m in means.items() if m is not None}
        else:
            merged[name] = _mean(pairs)
    return type(parts[0])(**merged)


def _mean(pairs: Sequence[tuple[float | None, float]]) -> float | None:
    """Returns the mean of values by weight, if any value is known."""
    known = [(value, weight) for value, weight in pairs if value is not None]
    total = math.fsum(weight for _, weight in known)
    if not total:
        return None
    return math.fsum(value * weight for value, weight in known) / total
