"""The part of a page about a plan."""

from __future__ import annotations

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.configs.plan import Plan, format_seconds, summary
from tfrs_embed.tools.planner.html_report import sections
from tfrs_embed.tools.report.page import Part, Section


def plan(path: str, text: str) -> Part:
    """Returns the part of the plan at `path`, given its JSON.

    Raises:
        ValueError: the JSON is not that of a plan.
    """
    read = Plan.from_json(text)
    most = max(replica.bytes for replica in read.per_replica)
    facts = (
        ("replicas", f"{read.replicas:,}"),
        ("hardware", read.hardware.name),
        ("tables", f"{len(read.tables):,}"),
        ("memory with slots", format_bytes(read.total_bytes)),
        ("fullest replica", format_bytes(most)),
        ("predicted step", format_seconds(read.seconds)),
        ("sent per replica", format_bytes(read.sent_bytes)),
        ("imbalance", f"{read.imbalance:.2f}"),
    )
    (title, content), *others = sections(read)
    made = [Section(title, content, summary(read)[0] + ".")]
    made += [Section(title, content) for title, content in others]
    return Part("Plan", path, facts, tuple(made))
