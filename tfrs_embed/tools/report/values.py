"""Sections about tables' values: their sizes, norms and dead rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion.contents import Contents
from tfrs_embed.tools.report import page, pictures
from tfrs_embed.tools.report.measured import NORM_BINS, MeasuredTable

_MOST_OTHERS = 20
_NORMS = (
    "Norms leave out values that aren't finite. The median leaves out zero "
    "rows, and is exact to a tenth. A row counts as never updated if all of "
    "its slots have their initial values. These are taken to be zero, or, in "
    "slots that add up squares, the least number of all rows."
)


def by_name(tables: Sequence[MeasuredTable]) -> dict[str, MeasuredTable]:
    """Returns tables by their names, or by their paths in several layers."""
    layers = {each.table.layer for each in tables}
    # Each DynamicEmbedding names its table "table".
    nameless = any(each.table.name in ("", "table") for each in tables)
    if len(layers) == 1 and not nameless:
        return {each.table.name: each for each in tables}
    return {each.table.path or "table": each for each in tables}


def facts(tables: Sequence[MeasuredTable]) -> dict[str, str]:
    """Returns the most important names and values."""
    rows = sum(each.rows for each in tables)
    zero = sum(each.statistics.zero_rows for each in tables)
    with_slots = [each for each in tables if each.untouched is not None]
    bad = sum(each.statistics.nan + each.statistics.inf for each in tables)
    found = {
        "tables": f"{len(tables):,}",
        "rows": f"{rows:,}",
        "memory with slots": format_bytes(sum(each.bytes for each in tables)),
        "zero rows": page.percent_of(zero, rows),
    }
    if with_slots:
        untouched = sum(each.untouched or 0 for each in with_slots)
        total = sum(each.rows for each in with_slots)
        found["never updated"] = page.percent_of(untouched, total)
    return {**found, "NaN and infinite values": f"{bad:,}"}


def sizes(tables: Mapping[str, MeasuredTable]) -> page.Section:
    """Returns the section on the sizes of tables, by their names."""
    total = sum(each.bytes for each in tables.values())
    total_of_rows = sum(each.row_bytes for each in tables.values())
    rows = [
        {
            "table": name,
            "by": "keys" if each.table.keys else "ids",
            "rows": f"{each.rows:,}",
            "dim": str(each.table.shape[1]),
            "dtype": each.table.columns[PARAMETERS].dtype.name,
            "rows' size": format_bytes(each.row_bytes),
            "slots": ", ".join(n for n in each.table.columns if n != PARAMETERS)
            or "-",
            "slots' size": format_bytes(each.bytes - each.row_bytes),
            "size": format_bytes(each.bytes),
            "share": page.percent_of(each.bytes, total),
        }
        for name, each in tables.items()
    ]
    last = dict.fromkeys(rows[0], "") | {
        "table": "total",
        "rows": f"{sum(each.rows for each in tables.values()):,}",
        "rows' size": format_bytes(total_of_rows),
        "slots' size": format_bytes(total - total_of_rows),
        "size": format_bytes(total),
    }
    picture = pictures.bars(
        "Memory of the tables",
        {k: [t.row_bytes, t.bytes - t.row_bytes] for k, t in tables.items()},
        format_bytes,
        ["rows", "slots"],
    )
    return page.section("Tables by size", [picture], rows, total=last)


def norms(tables: Mapping[str, MeasuredTable]) -> page.Section:
    """Returns the section on the norms and dead rows of tables."""

    def count(number: int | None, each: MeasuredTable) -> str:
        if not number:
            return "-" if number is None else "0"
        return f"{number:,} ({page.percent_of(number, each.rows)})"

    rows = [
        {
            "table": name,
            "norm": f"{each.statistics.norm:.5g}",
            "mean row": f"{each.statistics.mean_row_norm:.4g}",
            "median row": _median(each.norms),
            "largest row": f"{each.statistics.max_row_norm:.4g}",
            "zero rows": count(each.statistics.zero_rows, each),
            "never updated": count(each.untouched, each),
            "NaN": f"{each.statistics.nan:,}",
            "inf": f"{each.statistics.inf:,}",
        }
        for name, each in tables.items()
    ]
    drawn = [
        _distribution(tables),
        _shares(
            "Rows that are zero",
            {name: each.zero_share for name, each in tables.items()},
        ),
        _shares(
            "Rows that were never updated",
            {name: each.untouched_share for name, each in tables.items()},
        ),
    ]
    return page.section("Norms and dead rows", drawn, rows, text=_NORMS)


def _distribution(tables: Mapping[str, MeasuredTable]) -> str:
    used = np.flatnonzero(sum(each.norms for each in tables.values()))
    if not used.size:
        return ""
    # The lines begin and end in an empty bin.
    bins = slice(max(0, used[0] - 1), used[-1] + 2)
    x = NORM_BINS[bins].tolist()
    return pictures.lines(
        "Norms of rows, as shares of the table's rows that are not zero",
        {
            name: dict(zip(x, each.norms[bins] / each.norms.sum(), strict=True))
            for name, each in tables.items()
            if each.norms.any()
        },
        page.percent,
        x_label="norm",
        log_x=True,
        least=0,
    )


def _shares(caption: str, shares: Mapping[str, float | None]) -> str:
    if not any(shares.values()):
        return ""
    known = {name: [v] for name, v in shares.items() if v is not None}
    return pictures.bars(caption, known, page.percent)


def others(contents: Contents) -> page.Section | None:
    """Returns the section on variables that belong to no table, if any."""
    if not contents.others:
        return None
    every = sorted(contents.others, key=lambda other: -other.nbytes)
    rows = [
        {
            "variable": other.name,
            "shape": str(list(other.shape)),
            "dtype": other.dtype,
            "size": format_bytes(other.nbytes),
        }
        for other in every[:_MOST_OTHERS]
    ]
    if hidden := every[_MOST_OTHERS:]:
        rows.append(
            {
                "variable": f"{len(hidden):,} smaller ones",
                "shape": "",
                "dtype": "",
                "size": format_bytes(sum(other.nbytes for other in hidden)),
            }
        )
    return page.section("Other variables", [], rows)


def _median(counts: np.ndarray) -> str:
    """Formats the median of norms that are counted in `NORM_BINS`."""
    if not counts.any():
        return "-"
    place = int(np.searchsorted(np.cumsum(counts), (counts.sum() + 1) // 2))
    return f"{NORM_BINS[place]:.2g}"
