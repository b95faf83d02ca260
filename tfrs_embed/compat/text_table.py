"""Tables of text, and sizes in bytes as text."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any


def text_table(
    head: Sequence[str],
    lines: Sequence[Sequence[str]],
    left: Collection[str],
    total: Sequence[str] | None = None,
) -> list[str]:
    """Returns the lines of a table in columns.

    Args:
        head: the columns' names.
        lines: the cells, line by line.
        left: the names of left-aligned columns; the others are right-aligned.
        total: the cells of a last line, below a rule.
    """
    last = [] if total is None else [total]
    widths = [
        max(map(len, cells)) for cells in zip(head, *lines, *last, strict=True)
    ]

    def text(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(head, cells, widths, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    result = [text(head), rule, *map(text, lines)]
    return result if total is None else [*result, rule, text(total)]


def value_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns the lines of a table with a column for each key of the rows.

    Columns of texts are left-aligned.
    """
    if not rows:
        return []
    left = [name for name, value in rows[0].items() if isinstance(value, str)]
    lines = [[format_value(*item) for item in row.items()] for row in rows]
    return text_table(list(rows[0]), lines, left)


def format_value(column: str, value: Any) -> str:
    """Formats a value; the column's name tells bytes and shares."""
    if value is None:
        return "-"
    if not isinstance(value, int | float):
        return str(value)
    if "bytes" in column:
        return format_bytes(value)
    if "share" in column:
        return f"{100 * value:.3g}%"
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.4g}"


def format_bytes(size: float) -> str:
    """Returns a size in a suitable binary unit, e.g. "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
