"""Sections on what tables hold: their sizes, norms and dead rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion.contents import Contents
from tfrs_embed.tools.planner import html_parts
from tfrs_embed.tools.report import pictures
from tfrs_embed.tools.report.measured import (
    STEPS_PER_OCTAVE,
    UPPER_NORMS,
    MeasuredTable,
)
from tfrs_embed.tools.report.page import Section

_MOST_OTHERS = 20


def names(tables: Sequence[MeasuredTable]) -> list[str]:
    """Names of tables: paths, without what all of them begin with.

    Args:
        tables: the tables.
    """
    layers = {each.table.layer for each in tables}
    # The second is the name of every DynamicEmbedding's table.
    nameless = any(each.table.name in ("", "table") for each in tables)
    if len(layers) == 1 and not nameless:
        return [each.table.name for each in tables]
    return [each.table.path or "table" for each in tables]


def facts(tables: Sequence[MeasuredTable]) -> tuple[tuple[str, str], ...]:
    """What is most worth knowing of tables: names and values.

    Args:
        tables: the tables.
    """
    rows = sum(each.rows for each in tables)
    zero = sum(each.statistics.zero_rows for each in tables)
    told = [each for each in tables if each.untouched is not None]
    bad = sum(each.statistics.nan + each.statistics.inf for each in tables)
    found = [
        ("tables", f"{len(tables):,}"),
        ("rows", f"{rows:,}"),
        ("memory with slots", format_bytes(sum(each.bytes for each in tables))),
        ("zero rows", share(zero, rows)),
    ]
    if told:
        untouched = sum(each.untouched or 0 for each in told)
        of = sum(each.rows for each in told)
        found.append(("never updated", share(untouched, of)))
    return (*found, ("NaN and infinite values", f"{bad:,}"))


def sizes(tables: Sequence[MeasuredTable]) -> Section:
    """The section on sizes and memory.

    Args:
        tables: the tables, the largest first.
    """
    total = sum(each.bytes for each in tables)
    head = (
        "table",
        "by",
        "rows",
        "dim",
        "dtype",
        "rows' size",
        "slots",
        "slots' size",
        "size",
        "share",
    )
    lines = []
    for name, each in zip(names(tables), tables, strict=True):
        slots = [n for n in each.table.columns if n != PARAMETERS]
        lines.append(
            (
                name,
                "keys" if each.table.keys else "ids",
                f"{each.rows:,}",
                str(each.table.shape[1]),
                each.table.columns[PARAMETERS].dtype.name,
                format_bytes(each.row_bytes),
                ", ".join(slots) or "-",
                format_bytes(each.bytes - each.row_bytes),
                format_bytes(each.bytes),
                share(each.bytes, total),
            )
        )
    last = ["total", "", f"{sum(each.rows for each in tables):,}", "", ""]
    last += [format_bytes(sum(each.row_bytes for each in tables)), ""]
    last += [
        format_bytes(sum(each.bytes - each.row_bytes for each in tables)),
        format_bytes(total),
        "",
    ]
    picture = pictures.bars(
        "Memory of the tables",
        names(tables),
        {
            "rows": [each.row_bytes for each in tables],
            "slots": [each.bytes - each.row_bytes for each in tables],
        },
        format_bytes,
    )
    content = html_parts.pictures([picture]) + html_parts.table(
        head, lines, ("table", "by", "dtype", "slots"), last
    )
    return Section("Tables by size", content)


def norms(tables: Sequence[MeasuredTable]) -> Section:
    """The section on norms and dead rows.

    Args:
        tables: the tables, the largest first.
    """
    head = (
        "table",
        "norm",
        "mean row",
        "median row",
        "largest row",
        "zero rows",
        "never updated",
        "NaN",
        "inf",
    )
    lines = []
    for name, each in zip(names(tables), tables, strict=True):
        found = each.statistics
        untouched = "-"
        if each.untouched is not None:
            untouched = _count(each.untouched, each.rows)
        lines.append(
            (
                name,
                f"{found.norm:.5g}",
                f"{found.mean_row_norm:.4g}",
                _median(each.norms),
                f"{found.max_row_norm:.4g}",
                _count(found.zero_rows, each.rows),
                untouched,
                f"{found.nan:,}",
                f"{found.inf:,}",
            )
        )
    content = html_parts.pictures(
        [_distribution(tables), _dead(tables)]
    ) + html_parts.table(head, lines, ("table",))
    text = (
        "Norms are those of finite values; the median is of the rows that are "
        "not zero, to a tenth of it. A row was never updated if its "
        "slots are all as they begin: zero, or, if they add squares up, the "
        "least number there is."
    )
    return Section("Norms and dead rows", content, text)


def _distribution(tables: Sequence[MeasuredTable]) -> str:
    counts = np.stack([each.norms for each in tables])
    used = np.flatnonzero(counts.sum(0))
    if not used.size:
        return ""
    # A step of no rows on either side, for a line to begin and to end at.
    low, high = max(0, used[0] - 1), min(len(UPPER_NORMS), used[-1] + 2)
    middle = UPPER_NORMS[low:high] * 2 ** (-0.5 / STEPS_PER_OCTAVE)
    series: dict[str, list[float | None]] = {}
    for name, each in zip(names(tables), tables, strict=True):
        if each.norms.any():
            of_table = each.norms[low:high] / each.norms.sum()
            series[name] = [float(value) for value in of_table]
    return pictures.lines(
        "Norms of rows, as shares of the table's rows that are not zero",
        [float(value) for value in middle],
        series,
        percent,
        x_label="norm",
        log_x=True,
        least=0,
    )


def _dead(tables: Sequence[MeasuredTable]) -> str:
    """Shares of rows that are zero, or that nothing has updated."""
    counts: dict[str, list[int | None]] = {
        "Rows that are zero": [each.statistics.zero_rows for each in tables],
        "Rows that were never updated": [each.untouched for each in tables],
    }
    drawn = []
    for caption, rows in counts.items():
        pairs = [
            (name, 100 * count / max(1, each.rows))
            for name, each, count in zip(
                names(tables), tables, rows, strict=True
            )
            if count is not None
        ]
        if any(value for _, value in pairs):
            named, values = zip(*pairs, strict=True)
            drawn.append(
                pictures.bars(
                    caption, named, {"share": values}, lambda v: f"{v:.3g}%"
                )
            )
    return "".join(drawn)


def others(contents: Contents) -> Section | None:
    """The section on variables that belong to no table.

    Args:
        contents: the checkpoint's contents.
    """
    every = sorted(contents.others, key=lambda other: -other.nbytes)
    if not every:
        return None
    shown, hidden = every[:_MOST_OTHERS], every[_MOST_OTHERS:]
    lines = [
        (o.name, str(list(o.shape)), o.dtype, format_bytes(o.nbytes))
        for o in shown
    ]
    if hidden:
        size = format_bytes(math.fsum(other.nbytes for other in hidden))
        lines.append((f"{len(hidden):,} smaller ones", "", "", size))
    head = ("variable", "shape", "dtype", "size")
    return Section("Other variables", html_parts.table(head, lines, head[:3]))


def share(part: float, of: float) -> str:
    """A part in percent, e.g. "12.5%"; "-" of nothing."""
    return percent(part / of) if of else "-"


def percent(value: float) -> str:
    """A share in percent, e.g. "12.5%"."""
    return f"{100 * value:.3g}%"


def _count(rows: int, of: int) -> str:
    return f"{rows:,} ({share(rows, of)})" if rows else "0"


def _median(counts: np.ndarray) -> str:
    if not counts.any():
        return "-"
    place = int(np.searchsorted(np.cumsum(counts), (counts.sum() + 1) // 2))
    return f"{UPPER_NORMS[place] * 2 ** (-0.5 / STEPS_PER_OCTAVE):.2g}"
