"""The part of a page about a report of SparseCores' limits."""

from __future__ import annotations

import dataclasses

from tfrs_embed.sparsecore.limits.report import LimitsReport
from tfrs_embed.tools.report import page

_STACKS = {
    "Loads, limits and memory of stacks": (
        *("max_ids", "headroom_ids", "max_unique_ids", "headroom_unique_ids"),
        *("fullest_sparse_core", "load", "table_bytes", "buffer_bytes"),
    )
}
_TABLES = {
    "Lookups of each table": (
        *("rows", "dim", "ids", "unique_ids", "share", "stack"),
    )
}


def limits(path: str, text: bytes) -> page.PagePart:
    """Returns the part of the limits report at `path`, given its JSON.

    Raises:
        ValueError: the JSON is not that of a limits report.
    """
    report = LimitsReport.from_json(text)
    exceeded = [
        f"Stack '{s.stack}' goes beyond the limits that were configured: "
        "training would stop with an error. Use those that compute_limits "
        "returned."
        for s in report.stacks
        if s.headroom_ids < 0 or s.headroom_unique_ids < 0
    ]
    facts = {
        "topology": report.topology,
        "batches": report.batches,
        "tables": len(report.tables),
        "stacks": len(report.stacks),
        "table bytes on a chip": sum(s.table_bytes for s in report.stacks),
        "buffer bytes on a chip": sum(s.buffer_bytes for s in report.stacks),
        "stacks beyond limits": len(exceeded),
    }
    stacks = {s.stack: {0: dataclasses.asdict(s)} for s in report.stacks}
    tables = {t.table: {0: dataclasses.asdict(t)} for t in report.tables}
    made = [
        *page.sections("stack", stacks, _STACKS),
        *page.sections("table", tables, _TABLES),
    ]
    return page.PagePart("Limits", path, facts, made, exceeded)
