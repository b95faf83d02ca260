"""A statistics log, with the reports of all workers as one."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from tfrs_embed.tools.monitoring.log import FILE, read_workers
from tfrs_embed.tools.monitoring.reports import (
    KeyReport,
    LookupReport,
    ReplicaReport,
    StatisticsReport,
    TableReport,
    from_dict,
)

K = TypeVar("K")


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
            step: _table(list(steps[step].values())) for step in sorted(steps)
        }
        for (layer, table), steps in found.items()
    }
    return Log(len(workers), tables, replicas, imbalance)


def _table(parts: Sequence[TableReport]) -> TableReport:
    """Combines the workers' reports of a table and a step."""
    weights = [max(0, part.rows_read) for part in parts]
    lookups = [part.lookups for part in parts if part.lookups is not None]
    keys = [part.keys for part in parts if part.keys is not None]
    return TableReport(
        table=parts[0].table,
        rows=sum(part.rows for part in parts),
        dim=parts[0].dim,
        dtype=parts[0].dtype,
        bytes=sum(part.bytes for part in parts),
        rows_read=sum(weights),
        norms=_means([part.norms for part in parts], weights),
        nonfinite_rows=sum(part.nonfinite_rows for part in parts),
        untouched_share=_mean(
            [part.untouched_share for part in parts], weights
        ),
        changed_share=_mean([part.changed_share for part in parts], weights),
        update_norms=_means([part.update_norms for part in parts], weights),
        idle_shares=_means([part.idle_shares for part in parts], weights),
        lookups=_lookups(lookups) if lookups else None,
        keys=_keys(keys) if keys else None,
    )


def _lookups(parts: Sequence[LookupReport]) -> LookupReport:
    equal = [1.0] * len(parts)
    numbers = [dict(vars(part)) for part in parts]
    curves = [each.pop("top_shares") for each in numbers]
    means: dict[str, Any] = _means(numbers, equal)
    return LookupReport(**means, top_shares=_means(curves, equal))


def _keys(parts: Sequence[KeyReport]) -> KeyReport:
    """Adds the counts of workers, each of which has keys of its own."""
    numbers = [dict(vars(part)) for part in parts]
    curves = [each.pop("top_shares") for each in numbers]
    sizes = [part.size for part in parts]
    counts = {name: sum(each[name] for each in numbers) for name in numbers[0]}
    counts["top_share"] = _mean([p.top_share for p in parts], sizes) or 0.0
    return KeyReport(**counts, top_shares=_means(curves, sizes))


def _mean(
    values: Sequence[float | None], weights: Sequence[float]
) -> float | None:
    """Returns the weighted mean of the values that are known, if any."""
    pairs = [
        (v, w) for v, w in zip(values, weights, strict=True) if v is not None
    ]
    total = math.fsum(weight for _, weight in pairs)
    if not total:
        return None
    return math.fsum(value * weight for value, weight in pairs) / total


def _means(
    values: Sequence[Mapping[K, float]], weights: Sequence[float]
) -> dict[K, float]:
    """Returns the weighted mean of each of the values' keys."""
    means = {
        key: _mean([each.get(key) for each in values], weights)
        for key in dict.fromkeys(key for each in values for key in each)
    }
    return {key: mean for key, mean in means.items() if mean is not None}
