"""The page: its parts, and the template that puts them together."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from tfrs_embed.compat.version import __version__
from tfrs_embed.tools.report import html_parts

# Columns of text, which are aligned to the left; numbers are to the right.
_TEXT_COLUMNS = (
    *("table", "by", "dtype", "slots", "variable", "shape", "checkpoint"),
    *("stack", "replica", "counted by"),
)


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of a part.

    Attributes:
        title: its title.
        content: its HTML.
        text: an explanation below the title; "": none.
    """

    title: str
    content: str
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a page about one source.

    Attributes:
        kind: the kind of the source: "Checkpoint".
        path: the source's path.
        facts: the most important names and values.
        sections: its sections.
        notes: remarks, a sentence each.
    """

    kind: str
    path: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The kind, and the end of the path."""
        return f"{self.kind} {pathlib.PurePath(self.path).name or self.path}"


def section(
    title: str,
    pictures: Iterable[str],
    rows: Sequence[Mapping[str, str]],
    *,
    text: str = "",
    total: Mapping[str, str] | None = None,
) -> Section:
    """Returns a section of pictures and a table.

    Args:
        title: its title.
        pictures: the pictures' HTML, "" for a picture without data.
        rows: the table's rows: cells by the columns' names.
        text: an explanation below the title.
        total: a last row, behind a rule.
    """
    table = html_parts.table(
        list(rows[0]) if rows else [],
        [list(row.values()) for row in rows],
        _TEXT_COLUMNS,
        None if total is None else list(total.values()),
    )
    return Section(title, html_parts.pictures(pictures) + table, text)


def percent(share: float | None) -> str:
    """Formats a share, e.g. "12.5%"; "-" if it is unknown."""
    return "-" if share is None else f"{100 * share:.3g}%"


def percent_of(part: float, total: float) -> str:
    """Formats a part of a total in percent; "-" if the total is 0."""
    return percent(part / total if total else None)


def render(parts: list[Part]) -> str:
    """Returns the page's HTML."""
    import jinja2
    import markupsafe

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = environment.get_template("page.html.jinja").render(
        parts=parts,
        style=markupsafe.Markup(html_parts.STYLE),
        version=__version__,
    )
    # Names of files need not be valid Unicode.
    return str(text).encode("utf-8", "replace").decode("utf-8")
