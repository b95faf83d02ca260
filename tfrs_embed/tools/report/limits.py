"""The part of a page about a report of SparseCores' limits."""

from __future__ import annotations

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.sparsecore.limits.report import LimitsReport, StackLoad
from tfrs_embed.tools.report import page, pictures


def limits(path: str, text: str) -> page.Part:
    """Returns the part of the limits report at `path`, given its JSON.

    Raises:
        ValueError: the JSON is not that of a limits report.
    """
    report = LimitsReport.from_json(text)
    stacks = report.stacks
    exceeded = [
        f"Stack '{s.stack}' goes beyond the limits that were configured: "
        "training would stop with an error. Use those that compute_limits "
        "returned."
        for s in stacks
        if s.headroom_ids < 0 or s.headroom_unique_ids < 0
    ]
    tables = sum(s.table_bytes for s in stacks)
    buffers = sum(s.buffer_bytes for s in stacks)
    facts = (
        ("topology", report.topology),
        ("batches", f"{report.batches:,}"),
        ("tables", f"{len(report.tables):,}"),
        ("stacks", f"{len(stacks):,}"),
        ("tables on a chip", format_bytes(tables)),
        ("buffers on a chip", format_bytes(buffers)),
        ("stacks beyond limits", f"{len(exceeded):,}"),
    )
    sections = (_stacks(report), _tables(report))
    return page.Part("Limits", path, facts, sections, tuple(exceeded))


def _stacks(report: LimitsReport) -> page.Section:
    def used_ids(stack: StackLoad) -> float:
        return stack.max_ids / max(1, stack.max_ids + stack.headroom_ids)

    def used_unique_ids(stack: StackLoad) -> float:
        limit = stack.max_unique_ids + stack.headroom_unique_ids
        return stack.max_unique_ids / max(1, limit)

    stacks = sorted(report.stacks, key=used_ids, reverse=True)
    drawn = [
        pictures.bars(
            "Most ids from a SparseCore to one shard, as a share of the limit",
            {s.stack: [used_ids(s)] for s in stacks},
            page.percent,
        ),
        pictures.bars(
            "Most unique ids, as a share of the limit",
            {s.stack: [used_unique_ids(s)] for s in stacks},
            page.percent,
        ),
        pictures.bars(
            "Ids of the fullest SparseCore, divided by the mean",
            {s.stack: [s.load] for s in stacks},
            lambda v: f"{v:.2f}x",
        ),
        pictures.bars(
            "Memory of tables with slots, and of buffers, on each chip",
            {
                s.stack: [s.table_bytes, s.buffer_bytes]
                for s in sorted(
                    stacks, key=lambda s: -(s.table_bytes + s.buffer_bytes)
                )
            },
            format_bytes,
            ["tables and slots", "buffers"],
        ),
    ]
    rows = [
        {
            "stack": s.stack,
            "max ids": f"{s.max_ids:,}",
            "limit": f"{s.max_ids + s.headroom_ids:,}",
            "headroom": f"{s.headroom_ids:,}",
            "max unique ids": f"{s.max_unique_ids:,}",
            "their limit": f"{s.max_unique_ids + s.headroom_unique_ids:,}",
            "their headroom": f"{s.headroom_unique_ids:,}",
            "fullest core": str(s.fullest_sparse_core),
            "load": f"{s.load:.2f}x",
            "tables and slots": format_bytes(s.table_bytes),
            "buffers": format_bytes(s.buffer_bytes),
        }
        for s in stacks
    ]
    return page.section("Loads, limits and memory of stacks", drawn, rows)


def _tables(report: LimitsReport) -> page.Section:
    tables = sorted(report.tables, key=lambda t: -t.ids)
    drawn = [
        pictures.bars(
            "Share of all ids",
            {t.table: [t.share] for t in tables},
            page.percent,
        ),
        pictures.bars(
            "Share of the table's rows that were looked up",
            {t.table: [t.unique_ids / max(1, t.rows)] for t in tables},
            page.percent,
        ),
    ]
    rows = [
        {
            "table": t.table,
            "rows": f"{t.rows:,}",
            "dim": str(t.dim),
            "ids": f"{t.ids:,}",
            "unique ids": f"{t.unique_ids:,}",
            "rows looked up": page.percent_of(t.unique_ids, t.rows),
            "share of ids": page.percent(t.share),
            "stack": t.stack,
        }
        for t in tables
    ]
    return page.section("Lookups of each table", drawn, rows)
