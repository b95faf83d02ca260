"""Writes a plan as one page of HTML with pictures."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.configs.plan import (
    Plan,
    TablePlan,
    alternative_cells,
    format_seconds,
    replica_cells,
    summary,
    table_cells,
)
from tfrs_embed.tools.planner.html_parts import (
    SERIES,
    STYLE,
    figure,
    pictures,
    table,
)

_COLOURS = {
    "row": SERIES[0],
    "table": SERIES[1],
    "column": SERIES[3],
    "replicated": SERIES[2],
}
_BARS = SERIES[0]
_OTHERS = SERIES[7]
_WIDTH = 480
_LABELS = 160  # Room for the names to the left.
_LINE = 20


def html_report(plan: Plan) -> str:
    """Returns the page of a plan."""
    title = f"Placement of {len(plan.tables)} tables"
    lines = "".join(f"<p>{escape(line)}</p>\n" for line in summary(plan))
    body = "".join(
        f"<section>\n<h2>{escape(name)}</h2>\n{content}</section>\n"
        for name, content in sections(plan)
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{title}</h1>\n{lines}{body}</body>\n</html>\n"
    )


def sections(plan: Plan) -> list[tuple[str, str]]:
    """Returns the titles and the HTML of a plan's sections."""
    limit = plan.memory_per_replica
    replicas = plan.per_replica
    memory = _columns([r.bytes for r in replicas], format_bytes, limit)
    sent = _columns([r.sent_bytes for r in replicas], format_bytes)
    lookups = _columns([r.lookups for r in replicas], "{:,.0f}".format)
    of_replicas = [
        figure(memory, "Memory of each replica"),
        figure(sent, "Bytes that each replica sends in a step"),
        figure(lookups, "Rows that each replica looks up in a step"),
    ]
    placement = _placement(plan.tables, plan.replicas)
    times = figure(_alternatives(plan), "Predicted time of a step")
    return [
        ("Tables", table(*table_cells(plan))),
        ("Placement", figure(placement, "The replicas that hold each table")),
        ("Replicas", pictures(of_replicas) + table(*replica_cells(plan))),
        ("Alternatives", times + table(*alternative_cells(plan))),
    ]


def _svg(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:g}" '
        f'height="{height:g}" viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(label)}">\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _rect(
    x: float, y: float, width: float, height: float, colour: str, title: str
) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" '
        f'height="{height:.2f}" style="fill: {colour}"><title>{escape(title)}'
        "</title></rect>"
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" text-anchor="{anchor}">{escape(text)}'
        "</text>"
    )


def _label(name: str) -> str:
    return name if len(name) <= 18 else name[:17] + "…"


def _placement(tables: Sequence[TablePlan], replicas: int) -> str:
    """Draws a line for each table, with the ranks that hold it."""
    width = _WIDTH - _LABELS
    each = width / replicas
    parts, x = [], 0.0
    for placement, colour in _COLOURS.items():
        parts.append(_rect(x, 4, 12, 12, colour, placement))
        parts.append(_text(x + 18, 14, placement))
        x += 110
    for i, place in enumerate(tables, 1):
        y = i * _LINE + 4
        title = f"{place.table}: {place}, {format_bytes(place.bytes)}"
        parts.append(_text(_LABELS - 8, y + 12, _label(place.table), "end"))
        colour = _COLOURS[place.placement]
        if not place.ranks:
            parts.append(_rect(_LABELS, y, width, _LINE - 6, colour, title))
        for rank in place.ranks:
            left = _LABELS + rank * each
            parts.append(
                _rect(left, y, max(each, 1.0), _LINE - 6, colour, title)
            )
    y = (len(tables) + 1) * _LINE + 14
    parts.append(_text(_LABELS, y, "rank 0"))
    parts.append(_text(_WIDTH, y, f"rank {replicas - 1:,}", "end"))
    return _svg(_WIDTH, y + 8, "Each table's place", parts)


def _columns(
    values: Sequence[float],
    name: Callable[[float], str],
    limit: float | None = None,
) -> str:
    """Draws a column for each replica, and a line at a limit that is near."""
    height, top, left = 140, 20, 8
    most = max(values)
    scale = most or 1.0
    if limit is not None and limit > 2 * most:
        limit = None
    scale = max(scale, limit or 0.0)
    each = (_WIDTH - 2 * left) / len(values)
    parts = [_text(left, 14, f"most: {name(most)}, least: {name(min(values))}")]
    for rank, value in enumerate(values):
        size = value / scale * height
        x, y = left + rank * each, top + height - size
        title = f"rank {rank}: {name(value)}"
        parts.append(_rect(x, y, each * 0.8, size, _BARS, title))
    if limit is not None:
        y = top + height - limit / scale * height
        parts.append(
            f'<line x1="{left}" x2="{_WIDTH - left}" y1="{y:.2f}" y2="{y:.2f}" '
            'style="stroke: var(--alarm)" stroke-dasharray="6 4"/>'
        )
        parts.append(_text(_WIDTH - left, 14, f"limit: {name(limit)}", "end"))
    y = top + height + 16
    parts.append(_text(left, y, "rank 0"))
    if len(values) > 1:
        parts.append(
            _text(_WIDTH - left, y, f"rank {len(values) - 1:,}", "end")
        )
    return _svg(_WIDTH, y + 8, "A column for each replica", parts)


def _alternatives(plan: Plan) -> str:
    """Draws a bar for the predicted time of each choice."""
    choices = [("this plan", plan.seconds, True)]
    choices += [(a.name, a.seconds, a.fits) for a in plan.alternatives]
    scale = max(seconds for _, seconds, _ in choices) or 1.0
    room = _WIDTH - _LABELS - 130  # For the times to the right.
    parts = []
    for i, (name, seconds, fits) in enumerate(choices):
        y = i * _LINE + 4
        size = seconds / scale * room
        colour = _BARS if i == 0 else _OTHERS
        time = format_seconds(seconds) + ("" if fits else ", doesn't fit")
        parts.append(_text(_LABELS - 8, y + 12, name, "end"))
        parts.append(_rect(_LABELS, y, size, _LINE - 6, colour, time))
        parts.append(_text(_LABELS + size + 8, y + 12, time))
    height = len(choices) * _LINE + 8
    return _svg(_WIDTH, height, "The predicted time of each choice", parts)
