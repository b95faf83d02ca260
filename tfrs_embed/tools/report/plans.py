"""The part of a page about a plan."""

from __future__ import annotations

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.configs.plan import (
    Plan,
    format_seconds,
    reported_records,
    summary,
)
from tfrs_embed.tools.report.page import PagePart, table
from tfrs_embed.tools.report.pictures import bars


def plan(path: str, text: bytes) -> PagePart:
    """Returns the part of the plan at `path`, given its JSON.

    Raises:
        ValueError: the JSON is not that of a plan.
    """
    read = Plan.from_json(text)
    replicas = read.per_replica
    facts = {
        "replicas": read.replicas,
        "hardware": read.hardware.name,
        "tables": len(read.tables),
        "bytes with slots": read.total_bytes,
        "bytes of the fullest replica": max(r.bytes for r in replicas),
        "predicted step": format_seconds(read.seconds),
        "bytes sent per replica": read.sent_bytes,
        "imbalance": read.imbalance,
    }
    of_replicas = [
        bars(
            "Memory of each replica",
            {str(r.rank): r.bytes for r in replicas},
            format_bytes,
        ),
        bars(
            "Rows that each replica looks up in a step",
            {str(r.rank): r.lookups for r in replicas},
            "{:,.0f}".format,
        ),
    ]
    times = {a.name: a.seconds for a in read.alternatives}
    times = {"this plan": read.seconds, **times}
    pictures = {
        "replica": of_replicas,
        "placements": [bars("Predicted time of a step", times, format_seconds)],
    }
    titles = {
        "table": "Tables",
        "replica": "Replicas",
        "placements": "Alternatives",
    }
    sections = [
        table(titles[kind], kind, records, pictures.get(kind, ()))
        for kind, records in reported_records(read).items()
    ]
    return PagePart(
        "Plan", path, facts, sections, [f"{line}." for line in summary(read)]
    )
