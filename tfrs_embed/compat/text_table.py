"""Text for terminals: tables, sizes in bytes, names from anybody's files."""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Mapping, Sequence
from typing import Any

# Controls, formats such as those that turn text around, surrogates, private
# and unassigned letters; ends of lines and paragraphs.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def printable(text: str) -> str:
    r"""Returns text with escapes, such as \x1b, for what terminals don't print.

    A name in a file could otherwise colour, turn around or overwrite the text
    around it. Letters of all languages stay. A line's end is escaped, too.
    """
    if text.isprintable():
        return text
    return "".join(
        repr(c)[1:-1] if unicodedata.category(c) in _HIDDEN else c for c in text
    )


def text_table(
    head: Sequence[str],
    lines: Sequence[Sequence[str]],
    left: Collection[str],
    total: Sequence[str] | None = None,
) -> list[str]:
    """Returns the lines of a table in columns.

    Args:
        head: the columns' names.
        lines: the cells, line by line; they are shown as `printable` text.
        left: the names of left-aligned columns; the others are right-aligned.
        total: the cells of a last line, below a rule.
    """
    every = [head, *lines] if total is None else [head, *lines, total]
    shown = [[*map(printable, cells)] for cells in every]
    widths = [max(map(len, cells)) for cells in zip(*shown, strict=True)]

    def text(cells: Sequence[str]) -> str:
        padded = [
            cell.ljust(width) if name in left else cell.rjust(width)
            for name, cell, width in zip(head, cells, widths, strict=True)
        ]
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    result = [*map(text, shown)]
    result.insert(1, rule)
    if total is not None:
        result.insert(-1, rule)
    return result


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
