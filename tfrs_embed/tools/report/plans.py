"""The part of a page about a plan."""

from __future__ import annotations

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.configs.plan import (
    Plan,
    alternative_cells,
    format_seconds,
    replica_cells,
    summary,
    table_cells,
)
from tfrs_embed.tools.report.html_parts import pictures, table
from tfrs_embed.tools.report.page import Part, Section
from tfrs_embed.tools.report.pictures import bars


def plan(path: str, text: str) -> Part:
    """Returns the part of the plan at `path`, given its JSON.

    Raises:
        ValueError: the JSON is not that of a plan.
    """
    read = Plan.from_json(text)
    replicas = read.per_replica
    facts = (
        ("replicas", f"{read.replicas:,}"),
        ("hardware", read.hardware.name),
        ("tables", f"{len(read.tables):,}"),
        ("memory with slots", format_bytes(read.total_bytes)),
        ("fullest replica", format_bytes(max(r.bytes for r in replicas))),
        ("predicted step", format_seconds(read.seconds)),
        ("sent per replica", format_bytes(read.sent_bytes)),
        ("imbalance", f"{read.imbalance:.2f}"),
    )
    of_replicas = [
        bars(
            "Memory of each replica",
            {str(r.rank): [r.bytes] for r in replicas},
            format_bytes,
        ),
        bars(
            "Rows that each replica looks up in a step",
            {str(r.rank): [r.lookups] for r in replicas},
            "{:,.0f}".format,
        ),
    ]
    times = {a.name: [a.seconds] for a in read.alternatives}
    times = {"this plan": [read.seconds], **times}
    step = bars("Predicted time of a step", times, format_seconds)
    sections = (
        Section("Tables", table(*table_cells(read)), summary(read)[0] + "."),
        Section(
            "Replicas", pictures(of_replicas) + table(*replica_cells(read))
        ),
        Section("Alternatives", step + table(*alternative_cells(read))),
    )
    return Part("Plan", path, facts, sections)
