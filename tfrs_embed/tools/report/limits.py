"""The part of a page that a report of SparseCores' limits has."""

from __future__ import annotations

from collections.abc import Iterable

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.sparsecore.limits.report import LimitsReport, StackLoad
from tfrs_embed.tools.planner import html_parts
from tfrs_embed.tools.report import pictures, values
from tfrs_embed.tools.report.page import Part, Section


def limits(path: str, text: str) -> Part:
    """Makes a limits report's part of a page.

    Args:
        path: where it is.
        text: its JSON.

    Returns:
        The part.

    Raises:
        ValueError: it is none.
    """
    report = LimitsReport.from_json(text)
    stacks = report.stacks
    over = [
        f"Stack '{s.stack}' goes beyond the limits that were configured: "
        "training would stop with an error. Use those that compute_limits "
        "returned."
        for s in stacks
        if s.headroom_ids < 0 or s.headroom_unique_ids < 0
    ]
    facts = (
        ("topology", report.topology),
        ("batches", f"{report.batches:,}"),
        ("tables", f"{len(report.tables):,}"),
        ("stacks", f"{len(stacks):,}"),
        ("tables on a chip", _total(s.table_bytes for s in stacks)),
        ("buffers on a chip", _total(s.buffer_bytes for s in stacks)),
        ("stacks beyond limits", f"{len(over):,}"),
    )
    sections = (_loads(report), _memory(report), _tables(report))
    return Part("Limits", path, facts, sections, tuple(over))


def _total(sizes: Iterable[int]) -> str:
    return format_bytes(sum(sizes))


def _loads(report: LimitsReport) -> Section:
    stacks = sorted(report.stacks, key=_used, reverse=True)
    names = [s.stack for s in stacks]

    def used(most: int, headroom: int) -> float:
        return 100 * most / max(1, most + headroom)

    drawn = [
        pictures.bars(
            "Most ids that a SparseCore sent to one shard, of the limit",
            names,
            {"": [used(s.max_ids, s.headroom_ids) for s in stacks]},
            lambda v: f"{v:.3g}%",
        ),
        pictures.bars(
            "Most different ids, of the limit",
            names,
            {
                "": [
                    used(s.max_unique_ids, s.headroom_unique_ids)
                    for s in stacks
                ]
            },
            lambda v: f"{v:.3g}%",
        ),
        pictures.bars(
            "Ids of the fullest SparseCore, over the mean",
            names,
            {"": [s.load for s in stacks]},
            lambda v: f"{v:.2f}x",
        ),
    ]
    head = (
        "stack",
        "max ids",
        "limit",
        "headroom",
        "max unique ids",
        "their limit",
        "their headroom",
        "fullest core",
        "load",
    )
    lines = [
        (
            s.stack,
            f"{s.max_ids:,}",
            f"{s.max_ids + s.headroom_ids:,}",
            f"{s.headroom_ids:,}",
            f"{s.max_unique_ids:,}",
            f"{s.max_unique_ids + s.headroom_unique_ids:,}",
            f"{s.headroom_unique_ids:,}",
            str(s.fullest_sparse_core),
            f"{s.load:.2f}x",
        )
        for s in stacks
    ]
    content = html_parts.pictures(drawn)
    content += html_parts.table(head, lines, ("stack",))
    return Section("Loads and limits", content)


def _used(stack: StackLoad) -> float:
    return stack.max_ids / max(1, stack.max_ids + stack.headroom_ids)


def _memory(report: LimitsReport) -> Section:
    stacks = sorted(
        report.stacks, key=lambda s: -(s.table_bytes + s.buffer_bytes)
    )
    picture = pictures.bars(
        "Tables, slots and buffers",
        [s.stack for s in stacks],
        {
            "tables and slots": [s.table_bytes for s in stacks],
            "buffers": [s.buffer_bytes for s in stacks],
        },
        format_bytes,
    )
    head = ("stack", "tables and slots", "buffers")
    lines = [
        (s.stack, format_bytes(s.table_bytes), format_bytes(s.buffer_bytes))
        for s in stacks
    ]
    content = html_parts.pictures([picture])
    content += html_parts.table(head, lines, ("stack",))
    return Section("Memory on each chip", content)


def _tables(report: LimitsReport) -> Section:
    tables = sorted(report.tables, key=lambda t: -t.ids)
    drawn = [
        pictures.bars(
            "Share of all ids",
            [t.table for t in tables],
            {"": [100 * t.share for t in tables]},
            lambda v: f"{v:.3g}%",
        ),
        pictures.bars(
            "Rows that were looked up, of the table's",
            [t.table for t in tables],
            {"": [100 * t.unique_ids / max(1, t.rows) for t in tables]},
            lambda v: f"{v:.3g}%",
        ),
    ]
    head = (
        "table",
        "rows",
        "dim",
        "ids",
        "unique ids",
        "rows looked up",
        "share of ids",
        "stack",
    )
    lines = [
        (
            t.table,
            f"{t.rows:,}",
            str(t.dim),
            f"{t.ids:,}",
            f"{t.unique_ids:,}",
            values.share(t.unique_ids, t.rows),
            values.percent(t.share),
            t.stack,
        )
        for t in tables
    ]
    content = html_parts.pictures(drawn)
    content += html_parts.table(head, lines, ("table", "stack"))
    return Section("Lookups of each table", content)
