"""The part of a page about checkpoints of one run, or an exported model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from tfrs_embed.tools.conversion import exported, reading
from tfrs_embed.tools.conversion.contents import NO_TABLES, Contents
from tfrs_embed.tools.report import page
from tfrs_embed.tools.report.measured import measure_tables

_UNTOUCHED = (
    "Untouched rows are those whose slots all have their initial values. A "
    "checkpoint doesn't hold these: they are taken to be zero, or, in slots "
    "that add up squares, the least number of all rows."
)
_COLUMNS = {
    "Tables by size": (
        *("by", "rows", "dim", "dtype", "slots"),
        *("row_bytes", "slot_bytes", "bytes"),
    ),
    "Norms": ("norm", "mean_row_norm", "max_row_norm", "nan", "inf"),
    "Dead rows": ("zero_share", "untouched_share"),
    "Hot keys": ("keys",),
}


def checkpoints(paths: Sequence[str]) -> page.PagePart:
    """Reads checkpoints of one run, or an exported model.

    Args:
        paths: the checkpoints' paths, the oldest first if they hold no step;
            or one SavedModel.

    Returns:
        The last checkpoint's tables, and their growth over the checkpoints.

    Raises:
        ValueError: there is no such checkpoint, it has no tables, or two have
            no table in common.
        tf.errors.OpError: one is damaged.
    """
    run = list({c.path: c for c in map(reading.read, paths)}.values())
    for each in run:
        if not each.tables:
            raise ValueError(f"'{each.path}' {NO_TABLES}")
        first, other = ({t.path for t in c.tables} for c in (run[0], each))
        if first.isdisjoint(other):
            raise ValueError(
                f"'{run[0].path}' and '{each.path}' have no table in common: "
                "several checkpoints must be of one run. Make a report of each."
            )
    steps = [step for each in run if (step := _step(each)) is not None]
    if len(steps) == len(run):
        run.sort(key=lambda each: _step(each) or 0)
    by_step = len(set(steps)) == len(run)
    tables: dict[str, dict[int, page.Record]] = {}
    records = {}
    names = [os.path.basename(each.path.rstrip("/")) for each in run]
    for i, (each, name) in enumerate(zip(run, names, strict=True), 1):
        step = _step(each)
        x = step if by_step and step is not None else i
        measured = measure_tables(each)
        for key, table in measured.items():
            tables.setdefault(key, {})[x] = table
        records[name if names.count(name) == 1 else each.path] = {
            "step": step,
            **_totals(list(measured.values())),
        }
    # Tables that the last checkpoint lacks are left out.
    tables = {key: tables[key] for key in measured}
    made = page.sections(
        "table", tables, _COLUMNS, "step" if by_step else "checkpoint"
    )
    if len(run) > 1:
        title = "Growth over checkpoints"
        made.append(page.table(title, "checkpoint", records))
    last = run[-1]
    facts = {
        "written by": last.format,
        "checkpoints": len(run),
        **list(records.values())[-1],
    }
    has_slots = any(t["untouched_share"] is not None for t in measured.values())
    notes = [*([_UNTOUCHED] if has_slots else []), *last.notes]
    return page.PagePart(_kind(last), last.path, facts, made, notes)


def _step(contents: Contents) -> int | None:
    """Returns the number of updates of the layer with most, if it is known."""
    return max(contents.steps.values(), default=None)


def _totals(tables: Sequence[page.Record]) -> dict[str, Any]:
    rows = sum(table["rows"] for table in tables)
    return {
        "tables": len(tables),
        "rows": rows,
        "bytes": sum(table["bytes"] for table in tables),
        "zero_share": sum(t["zero_rows"] for t in tables) / max(1, rows),
        "NaN and infinite values": sum(t["nan"] + t["inf"] for t in tables),
    }


def _kind(contents: Contents) -> str:
    if contents.format == exported.FORMAT:
        return "Exported model"
    if exported.is_saved_model(contents.path):
        return "SavedModel"
    return "Checkpoint"
