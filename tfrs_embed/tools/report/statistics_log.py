"""The part of a page about a statistics log."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Mapping

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.tools.monitoring.log import FILE
from tfrs_embed.tools.monitoring.reports import (
    KeyReport,
    LookupReport,
    TableReport,
)
from tfrs_embed.tools.report import hot_rows, page, pictures
from tfrs_embed.tools.report.worker_logs import Log, read

_SEVERAL = (
    "{} workers wrote this log, each about its own rows. Numbers of rows and "
    "bytes are sums; shares and quantiles are means, weighted by the rows that "
    "were read."
)


def is_log(path: str) -> bool:
    """Whether a path is a log's folder, or the file in it."""
    here = pathlib.Path(path)
    return here.name.startswith(FILE) or any(here.glob(f"{FILE}*"))


def statistics_log(path: str) -> page.Part:
    """Returns the part of a log, given its folder or file.

    Raises:
        OSError: it can't be read.
        ValueError: it has no reports, or other lines.
    """
    here = pathlib.Path(path)
    folder = str(here.parent if here.name.startswith(FILE) else here)
    log = read(folder)
    steps = sorted(
        {step for reports in log.tables.values() for step in reports}
    )
    last = log.last().values()
    facts = (
        ("steps", f"{steps[0]:,} to {steps[-1]:,}"),
        ("reports", f"{len(steps):,}"),
        ("tables", f"{len(log.tables):,}"),
        ("rows", f"{sum(t.rows for t in last):,}"),
        ("memory with slots", format_bytes(sum(t.bytes for t in last))),
        (
            "rows with NaN or infinity",
            f"{sum(t.nonfinite_rows for t in last):,}",
        ),
    )
    made = [_sizes(log), _norms(log), _dead(log), _hot(log), _keys(log)]
    sections = [each for each in (*made, _replicas(log)) if each is not None]
    notes = (_SEVERAL.format(log.workers),) if log.workers > 1 else ()
    return page.Part("Statistics", folder, facts, tuple(sections), notes)


def _by_step(
    log: Log,
    text: pictures.Format,
    values: Mapping[str, Callable[[TableReport], float | None]],
) -> list[str]:
    """Draws the tables' values over the steps, given by the captions."""
    return [
        pictures.lines(
            caption,
            {
                name: {step: value(report) for step, report in reports.items()}
                for name, reports in log.tables.items()
            },
            text,
            x_label="step",
        )
        for caption, value in values.items()
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _sizes(log: Log) -> page.Section:
    last = sorted(log.last().items(), key=lambda each: -each[1].bytes)
    total = sum(t.bytes for _, t in last)
    rows = [
        {
            "table": name,
            "rows": f"{t.rows:,}",
            "dim": str(t.dim),
            "dtype": t.dtype,
            "size": format_bytes(t.bytes),
            "share": page.percent_of(t.bytes, total),
        }
        for name, t in last
    ]
    drawn = [
        pictures.bars(
            "Memory of the tables, with slots",
            {name: [t.bytes] for name, t in last},
            format_bytes,
        )
    ]
    if any(
        len({t.bytes for t in reports.values()}) > 1
        for reports in log.tables.values()
    ):
        drawn += _by_step(
            log, format_bytes, {"Memory, over steps": lambda t: t.bytes}
        )
    return page.section("Tables by size", drawn, rows)


def _norms(log: Log) -> page.Section:
    rows = [
        {
            "table": name,
            "least norm": _number(t.norms.get(0.0)),
            "median": _number(t.norms.get(0.5)),
            "99%": _number(t.norms.get(0.99)),
            "largest": _number(t.norms.get(1.0)),
            "median change": _number(t.update_norms.get(0.5)),
            "largest change": _number(t.update_norms.get(1.0)),
            "NaN/Inf rows": f"{t.nonfinite_rows:,}",
        }
        for name, t in log.last().items()
    ]
    drawn = _by_step(
        log,
        _number,
        {
            "Median norm of rows": lambda t: t.norms.get(0.5),
            "99% of rows have less than this norm": lambda t: t.norms.get(0.99),
            "Median change of a row that changed since the last report": (
                lambda t: t.update_norms.get(0.5)
            ),
        },
    )
    if any(t.nonfinite_rows for x in log.tables.values() for t in x.values()):
        caption = "Rows read that have NaN or infinity"
        drawn += _by_step(log, _whole, {caption: lambda t: t.nonfinite_rows})
    text = "The table is of each table's last report."
    return page.section("Norms", drawn, rows, text=text)


def _dead(log: Log) -> page.Section:
    last = log.last()
    idle = sorted({steps for t in last.values() for steps in t.idle_shares})
    rows = [
        {
            "table": name,
            "never updated": page.percent(t.untouched_share),
            "changed since last report": page.percent(t.changed_share),
            **{
                f"idle for {n:,} steps": page.percent(t.idle_shares.get(n))
                for n in idle
            },
        }
        for name, t in last.items()
    ]
    drawn = _by_step(
        log,
        page.percent,
        {
            "Rows that were never updated": lambda t: t.untouched_share,
            "Rows that changed since the last report": lambda t: (
                t.changed_share
            ),
        },
    )
    return page.section("Dead rows", drawn, rows)


def _hot(log: Log) -> page.Section | None:
    counted: dict[str, LookupReport | KeyReport] = {}
    for name, reports in log.tables.items():
        for t in reports.values():
            if found := t.lookups or t.keys:
                counted[name] = found
    if not counted:
        return None
    rows = []
    for name, found in counted.items():
        row = {"table": name, "counted by": "the table's counters"}
        row |= dict.fromkeys(("ids of a batch", "unique", "without a row"), "-")
        if isinstance(found, LookupReport):
            row |= {
                "counted by": "the batches",
                "ids of a batch": f"{found.ids:,.6g}",
                "unique": page.percent(found.unique_share),
                "without a row": page.percent(found.invalid_share),
            }
        rows.append(
            row | {"to the top 1% of rows": page.percent(found.top_share)}
        )
    # Logs of older versions have one share of rows only.
    curves = {
        name: found.top_shares or {0.01: found.top_share}
        for name, found in counted.items()
    }
    return page.section("Hot rows", [hot_rows.picture(curves)], rows)


def _keys(log: Log) -> page.Section | None:
    counts = ("size", "capacity", "admitted", "evicted", "rejected", "hits")
    rows = [
        {"table": name, **{n: f"{getattr(t.keys, n):,}" for n in counts}}
        for name, t in log.last().items()
        if t.keys is not None
    ]
    if not rows:
        return None
    drawn = _by_step(
        log,
        _whole,
        {"Keys that have rows": lambda t: t.keys.size if t.keys else None},
    )
    return page.section("Keys", drawn, rows)


def _replicas(log: Log) -> page.Section | None:
    if not log.replicas:
        return None
    drawn = [
        pictures.bars(
            "Unique keys that each replica looked up",
            {name: [each.unique_keys] for name, each in log.replicas.items()},
            _whole,
        ),
        pictures.bars(
            "Bytes that each replica sent",
            {name: [each.bytes] for name, each in log.replicas.items()},
            format_bytes,
        ),
        pictures.lines(
            "Most unique keys of a replica, divided by the mean",
            log.imbalance,
            lambda v: f"{v:.2f}",
            x_label="step",
        ),
    ]
    rows = [
        {
            "replica": name,
            "unique keys": f"{each.unique_keys:,}",
            "sent": format_bytes(each.bytes),
        }
        for name, each in log.replicas.items()
    ]
    text = "Counted between the last two reports with any lookups."
    return page.section("Replicas", drawn, rows, text=text)
