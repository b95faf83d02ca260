"""The part of a page that a log of statistics has."""

from __future__ import annotations

import dataclasses
import math
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.tools.monitoring.log import FILE, read_workers
from tfrs_embed.tools.planner import html_parts
from tfrs_embed.tools.report import pictures, values
from tfrs_embed.tools.report.hot_rows import hot_rows
from tfrs_embed.tools.report.page import Part, Section

_SEVERAL = (
    "{} workers wrote this log, each of the rows that it holds: numbers of "
    "rows and bytes are added up, shares and quantiles are means, weighted by "
    "the rows that were read."
)
#: A table's layer and name.
_Key = tuple[str, str]


@dataclasses.dataclass(frozen=True)
class _Point:
    """A table at a step, of all workers; shares are None where unknown."""

    rows: int
    dim: int
    dtype: str
    bytes: int
    nonfinite: int
    norms: Mapping[float, float]
    updates: Mapping[float, float]
    untouched: float | None
    changed: float | None
    idle: Mapping[int, float]
    lookups: Mapping[str, Any] | None
    keys: Mapping[str, Any] | None


@dataclasses.dataclass(frozen=True)
class _Log:
    """A log.

    Attributes:
        workers: how many wrote it.
        points: each table's, by step, ascending.
        replicas: the last report's, by name: unique keys and bytes.
        imbalance: each layer's, by step.
    """

    workers: int
    points: Mapping[_Key, Mapping[int, _Point]]
    replicas: Mapping[str, tuple[int, int]]
    imbalance: Mapping[str, Mapping[int, float]]

    def names(self) -> dict[_Key, str]:
        """The tables' names: with the layer's, if there are several."""
        one = len({layer for layer, _ in self.points}) == 1
        return {key: key[1] if one else "/".join(key) for key in self.points}

    def last(self) -> dict[_Key, _Point]:
        """The last of each table's points."""
        return {
            key: list(points.values())[-1]
            for key, points in self.points.items()
        }


def is_log(path: str) -> bool:
    """Whether a path is a log's folder, or the file in it."""
    here = pathlib.Path(path)
    return here.name.startswith(FILE) or any(here.glob(f"{FILE}*"))


def statistics_log(path: str) -> Part:
    """Reads a log of statistics, and makes its part of a page.

    Args:
        path: its folder, or its file.

    Returns:
        The part.

    Raises:
        OSError: it can't be read.
        ValueError: it has no reports, or other lines.
    """
    here = pathlib.Path(path)
    folder = here.parent if here.name.startswith(FILE) else here
    try:
        log = _log(read_workers(folder))
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"'{folder}': a line of {FILE} is no report of "
            f"tfrs_embed.monitoring: {type(error).__name__} {error}."
        ) from None
    if not log.points:
        raise ValueError(f"'{folder}': {FILE} has no reports of tables yet.")
    steps = sorted({step for points in log.points.values() for step in points})
    last = log.last().values()
    facts = (
        ("steps", f"{steps[0]:,} to {steps[-1]:,}"),
        ("reports", f"{len(steps):,}"),
        ("tables", f"{len(log.points):,}"),
        ("rows", f"{sum(point.rows for point in last):,}"),
        ("memory with slots", format_bytes(sum(p.bytes for p in last))),
        ("rows with NaN or infinity", f"{sum(p.nonfinite for p in last):,}"),
    )
    made = (_sizes, _norms, _dead, _hot, _keys, _replicas)
    sections = [section for make in made if (section := make(log))]
    notes = (_SEVERAL.format(log.workers),) if log.workers > 1 else ()
    return Part("Statistics", str(folder), facts, tuple(sections), notes)


def _log(workers: Sequence[Sequence[Mapping[str, Any]]]) -> _Log:
    found: dict[_Key, dict[int, dict[int, Mapping[str, Any]]]] = {}
    imbalance: dict[str, dict[int, float]] = {}
    replicas: dict[str, tuple[int, int]] = {}
    for worker, reports in enumerate(workers):
        for report in reports:
            layer, step = str(report["layer"]), int(report["step"])
            for table in report["tables"]:
                of_table = found.setdefault((layer, str(table["table"])), {})
                # A step that was trained once more replaces the first one.
                of_table.setdefault(step, {})[worker] = table
            uneven = report.get("imbalance")
            if uneven is not None and not worker:
                imbalance.setdefault(layer, {})[step] = float(uneven)
            for each in report.get("replicas", ()):
                name = f"{layer}: replica {each['replica']}"
                if len(workers) > 1:
                    name += f" of worker {worker}"
                keys, size = int(each["unique_keys"]), int(each["bytes"])
                if keys or size:
                    replicas[name] = keys, size
    points = {
        key: {
            step: _combine(list(of_table[step].values()))
            for step in sorted(of_table)
        }
        for key, of_table in found.items()
    }
    return _Log(len(workers), points, replicas, imbalance)


def _combine(tables: Sequence[Mapping[str, Any]]) -> _Point:
    """A table's reports of one step, from all workers."""
    weights = [max(0, int(table["rows_read"])) for table in tables]

    def share(name: str) -> float | None:
        return _mean([table.get(name) for table in tables], weights)

    def curve(name: str, number: Callable[[str], Any]) -> dict[Any, float]:
        every = dict.fromkeys(p for t in tables for p in t.get(name) or ())
        means = {
            number(p): _mean(
                [(t.get(name) or {}).get(p) for t in tables], weights
            )
            for p in every
        }
        return {p: mean for p, mean in means.items() if mean is not None}

    counted = [t["lookups"] for t in tables if t.get("lookups")]
    keys = [t["keys"] for t in tables if t.get("keys")]
    first = tables[0]
    return _Point(
        rows=sum(int(t["rows"]) for t in tables),
        dim=int(first["dim"]),
        dtype=str(first["dtype"]),
        bytes=sum(int(t["bytes"]) for t in tables),
        nonfinite=sum(int(t["nonfinite_rows"]) for t in tables),
        norms=curve("norms", float),
        updates=curve("update_norms", float),
        untouched=share("untouched_share"),
        changed=share("changed_share"),
        idle=curve("idle_shares", int),
        lookups=_means(counted) if counted else None,
        keys=_sums(keys) if keys else None,
    )


def _mean(
    found: Sequence[float | None], weights: Sequence[float]
) -> float | None:
    pairs = [
        (v, w) for v, w in zip(found, weights, strict=True) if v is not None
    ]
    total = math.fsum(weight for _, weight in pairs)
    if not pairs or not total:
        return None
    return math.fsum(value * weight for value, weight in pairs) / total


def _means(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lookups of several workers' batches."""
    equal = [1.0] * len(reports)
    names = ("ids", "unique_share", "invalid_share", "top_share")
    found: dict[str, Any] = {
        name: _mean([float(r[name]) for r in reports], equal) for name in names
    }
    found["top_shares"] = _curve(reports, equal)
    return found


def _sums(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Keys of several workers, each of which has its own."""
    names = ("size", "capacity", "admitted", "evicted", "rejected", "hits")
    found: dict[str, Any] = {n: sum(int(r[n]) for r in reports) for n in names}
    sizes = [float(r["size"]) for r in reports]
    found["top_share"] = _mean([float(r["top_share"]) for r in reports], sizes)
    found["top_shares"] = _curve(reports, sizes)
    return found


def _curve(
    reports: Sequence[Mapping[str, Any]], weights: Sequence[float]
) -> dict[float, float]:
    every = dict.fromkeys(p for r in reports for p in r.get("top_shares") or ())
    found = {
        float(p): _mean(
            [(r.get("top_shares") or {}).get(p) for r in reports], weights
        )
        for p in every
    }
    return {p: mean for p, mean in found.items() if mean is not None}


def _by_step(
    log: _Log, caption: str, value: _Value, text: pictures.Format
) -> str:
    """A picture of a value of each table, over the steps."""
    return _over_steps(
        caption,
        {
            log.names()[key]: {s: value(p) for s, p in points.items()}
            for key, points in log.points.items()
        },
        text,
    )


_Value = Callable[[_Point], float | None]


def _over_steps(
    caption: str,
    series: Mapping[str, Mapping[int, float | None]],
    text: pictures.Format,
) -> str:
    steps = sorted({step for found in series.values() for step in found})
    return pictures.lines(
        caption,
        [float(step) for step in steps],
        {n: [found.get(s) for s in steps] for n, found in series.items()},
        text,
        x_label="step",
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.6g}"


def _percent(value: float | None) -> str:
    return "-" if value is None else values.percent(value)


def _section(
    title: str,
    drawn: Iterable[str],
    head: Sequence[str],
    lines: Iterable[Sequence[str]],
    left: Sequence[str] = ("table",),
    text: str = "",
) -> Section:
    content = html_parts.pictures(drawn)
    content += html_parts.table(head, lines, left)
    return Section(title, content, text)


def _sizes(log: _Log) -> Section:
    last = sorted(log.last().items(), key=lambda each: -each[1].bytes)
    names = log.names()
    total = sum(point.bytes for _, point in last)
    lines = [
        (
            names[key],
            f"{p.rows:,}",
            str(p.dim),
            p.dtype,
            format_bytes(p.bytes),
            values.share(p.bytes, total),
        )
        for key, p in last
    ]
    drawn = [
        pictures.bars(
            "Memory of the tables, with slots",
            [names[key] for key, _ in last],
            {"": [p.bytes for _, p in last]},
            format_bytes,
        )
    ]
    if any(
        len({p.bytes for p in points.values()}) > 1
        for points in log.points.values()
    ):
        drawn.append(
            _by_step(log, "Memory, over steps", lambda p: p.bytes, format_bytes)
        )
    head = ("table", "rows", "dim", "dtype", "size", "share")
    return _section("Tables by size", drawn, head, lines, ("table", "dtype"))


def _norms(log: _Log) -> Section:
    head = (
        "table",
        "least norm",
        "median",
        "99%",
        "largest",
        "median change",
        "largest change",
        "NaN/Inf rows",
    )
    lines = [
        (
            log.names()[key],
            *(_number(p.norms.get(q)) for q in (0.0, 0.5, 0.99, 1.0)),
            *(_number(p.updates.get(q)) for q in (0.5, 1.0)),
            f"{p.nonfinite:,}",
        )
        for key, p in log.last().items()
    ]
    drawn = [
        _by_step(
            log, "Median norm of rows", lambda p: p.norms.get(0.5), _number
        ),
        _by_step(
            log,
            "99% of rows have less than this norm",
            lambda p: p.norms.get(0.99),
            _number,
        ),
        _by_step(
            log,
            "Median change of a row that changed since the last report",
            lambda p: p.updates.get(0.5),
            _number,
        ),
    ]
    if any(p.nonfinite for each in log.points.values() for p in each.values()):
        drawn.append(
            _by_step(
                log,
                "Rows with NaN or infinity, of those read",
                lambda p: p.nonfinite,
                lambda v: f"{v:,.0f}",
            )
        )
    text = "The table is of each table's last report."
    return _section("Norms", drawn, head, lines, text=text)


def _dead(log: _Log) -> Section:
    last = log.last()
    idle = sorted({steps for p in last.values() for steps in p.idle})
    head = (
        *("table", "never updated", "changed since last report"),
        *(f"idle for {steps:,} steps" for steps in idle),
    )
    lines = [
        (
            log.names()[key],
            _percent(p.untouched),
            _percent(p.changed),
            *(_percent(p.idle.get(steps)) for steps in idle),
        )
        for key, p in last.items()
    ]
    drawn = [
        _by_step(
            log, "Rows that were never updated", lambda p: p.untouched, _percent
        ),
        _by_step(
            log,
            "Rows that changed since the last report",
            lambda p: p.changed,
            _percent,
        ),
    ]
    return _section("Dead rows", drawn, head, lines)


def _hot(log: _Log) -> Section | None:
    counted: dict[_Key, tuple[str, Mapping[str, Any]]] = {}
    for key, points in log.points.items():
        for p in points.values():
            if p.lookups is not None:
                counted[key] = "the batches", p.lookups
            elif p.keys is not None:
                counted[key] = "the table's counters", p.keys
    if not counted:
        return None
    names = log.names()
    curves = {
        names[key]: found["top_shares"]
        for key, (_, found) in counted.items()
        if found["top_shares"]
    }
    drawn = [hot_rows(curves)]
    if len(curves) < len(counted):  # Of an older version.
        drawn.append(
            pictures.bars(
                "Share of lookups of the top 1% of rows",
                [names[key] for key in counted],
                {"": [100 * f["top_share"] for _, f in counted.values()]},
                lambda v: f"{v:.3g}%",
            )
        )
    head = (
        "table",
        "counted by",
        "ids of a batch",
        "unique",
        "without a row",
        "to the top 1% of rows",
    )
    lines = [
        (
            names[key],
            by,
            _count(found.get("ids")),
            _percent(found.get("unique_share")),
            _percent(found.get("invalid_share")),
            _percent(found.get("top_share")),
        )
        for key, (by, found) in counted.items()
    ]
    return _section("Hot rows", drawn, head, lines, ("table", "counted by"))


def _keys(log: _Log) -> Section | None:
    with_keys = {
        key: p.keys for key, p in log.last().items() if p.keys is not None
    }
    if not with_keys:
        return None
    counts = ("size", "capacity", "admitted", "evicted", "rejected", "hits")
    lines = [
        (log.names()[key], *(f"{found[name]:,}" for name in counts))
        for key, found in with_keys.items()
    ]
    drawn = [
        _by_step(
            log,
            "Keys that have rows",
            lambda p: None if p.keys is None else p.keys["size"],
            lambda v: f"{v:,.0f}",
        )
    ]
    return _section("Keys", drawn, ("table", *counts), lines)


def _replicas(log: _Log) -> Section | None:
    if not log.replicas:
        return None
    names = list(log.replicas)
    drawn = [
        pictures.bars(
            "Unique keys that each replica looked up",
            names,
            {"": [keys for keys, _ in log.replicas.values()]},
            lambda v: f"{v:,.0f}",
        ),
        pictures.bars(
            "Bytes that each replica sent",
            names,
            {"": [size for _, size in log.replicas.values()]},
            format_bytes,
        ),
        _over_steps(
            "Most unique keys of a replica, over their mean",
            log.imbalance,
            lambda v: f"{v:.2f}",
        ),
    ]
    lines = [
        (name, f"{keys:,}", format_bytes(size))
        for name, (keys, size) in log.replicas.items()
    ]
    head = ("replica", "unique keys", "sent")
    text = "Counted between the last two reports that saw any."
    return _section("Replicas", drawn, head, lines, ("replica",), text)
