"""The page: tables of numbers with pictures, and the template around them.

A record has one object's values by column. Nested columns, as in the JSON of a
statistics log, get names with slashes: "norms/0.5".
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from tfrs_embed.compat.text_table import format_value, printable
from tfrs_embed.compat.version import __version__
from tfrs_embed.tools.monitoring.reports import flatten
from tfrs_embed.tools.report.pictures import Picture, bars, lines

Record = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of a part: pictures, and a table.

    Attributes:
        title: its title.
        head, lines, left: the table, as arguments of `text_table`.
        pictures: the pictures.
    """

    title: str
    head: Sequence[str]
    lines: Sequence[Sequence[str]]
    left: Collection[str]
    pictures: Sequence[Picture] = ()


@dataclasses.dataclass(frozen=True)
class PagePart:
    """The part of a page about one source.

    Attributes:
        kind: the kind of the source: "Checkpoint".
        path: the source's path.
        facts: the most important values.
        sections: its sections.
        notes: remarks, a sentence each.
    """

    kind: str
    path: str
    facts: Record
    sections: Sequence[Section]
    notes: Sequence[str] = ()

    @property
    def title(self) -> str:
        """The kind, and the end of the path."""
        return f"{self.kind} {pathlib.PurePath(self.path).name or self.path}"

    @property
    def shown_facts(self) -> dict[str, str]:
        """The facts as text."""
        return {_title(k): format_value(k, v) for k, v in self.facts.items()}


def sections(
    kind: str,
    found: Mapping[str, Mapping[int, Record]],
    columns: Mapping[str, Sequence[str]],
    x_label: str = "",
) -> list[Section]:
    """Returns sections with pictures of columns, and tables of last values.

    A number that varies with x is drawn as a line for each object. Bytes and
    shares that don't vary are drawn as bars.

    Args:
        kind: the kind of the objects, such as "table".
        found: by the object's name, its records by x.
        columns: by the section's title, its columns, or the names that they
            begin with. A section without values is left out.
        x_label: the name of x, such as "step".
    """
    flat = {
        name: {x: flatten(records[x]) for x in sorted(records)}
        for name, records in found.items()
    }
    last = {name: list(records.values())[-1] for name, records in flat.items()}
    every = dict.fromkeys(
        column for record in last.values() for column in record
    )
    made = []
    for title, wanted in columns.items():
        shown = [
            c for w in wanted for c in every if f"{c}/".startswith(f"{w}/")
        ]
        rows = {
            name: {column: record.get(column) for column in shown}
            for name, record in last.items()
            if any(record.get(column) is not None for column in shown)
        }
        drawn = [_picture(column, flat, x_label) for column in shown]
        if rows:
            found_pictures = [each for each in drawn if each is not None]
            made.append(table(title, kind, rows, pictures=found_pictures))
    return made


def _picture(
    column: str, found: Mapping[str, Mapping[int, Record]], x_label: str
) -> Picture | None:
    series = {
        name: {
            x: record[column]
            for x, record in records.items()
            if isinstance(record.get(column), int | float)
        }
        for name, records in found.items()
    }
    series = {name: points for name, points in series.items() if points}

    formatter = functools.partial(format_value, column)
    if any(len(set(points.values())) > 1 for points in series.values()):
        return lines(_title(column), series, formatter, x_label)
    last = {name: list(points.values())[-1] for name, points in series.items()}
    if ("bytes" in column or "share" in column) and any(last.values()):
        return bars(_title(column), last, formatter)
    return None


def table(
    title: str,
    kind: str,
    records: Mapping[str, Record],
    pictures: Sequence[Picture] = (),
) -> Section:
    """Returns a section with a table: by the objects' names, their records."""
    columns = list(next(iter(records.values())))
    lines = [
        [name, *(format_value(column, record[column]) for column in columns)]
        for name, record in records.items()
    ]
    left = [
        _title(column)
        for column in columns
        if any(isinstance(record[column], str) for record in records.values())
    ]
    head = [kind, *map(_title, columns)]
    return Section(title, head, lines, [kind, *left], pictures=pictures)


def _title(column: str) -> str:
    return column.replace("_", " ").replace("/", " ")


def _shown(value: Any) -> Any:
    """What the page shows of a value; a macro's markup stays."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return printable(value) if is_text else value


def render(parts: Iterable[PagePart]) -> str:
    """Returns the page's HTML."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent),
        autoescape=True,
        finalize=_shown,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html.jinja").render(
        parts=list(parts), version=__version__
    )
    return str(page)
