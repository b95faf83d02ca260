"""The page: its parts, and the template that puts them together."""

from __future__ import annotations

import dataclasses
import pathlib

from tfrs_embed.compat.version import __version__
from tfrs_embed.tools.planner import html_parts


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of a part.

    Attributes:
        title: its title.
        content: its HTML.
        text: what a reader should know of it; "": nothing.
    """

    title: str
    content: str
    text: str = ""


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a page that one source has.

    Attributes:
        kind: what the source is: "Checkpoint".
        path: where it is.
        facts: what is most worth knowing: names and values.
        sections: its sections.
        notes: what a reader should know, a sentence each.
    """

    kind: str
    path: str
    facts: tuple[tuple[str, str], ...]
    sections: tuple[Section, ...]
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What it is, and the end of its path."""
        return f"{self.kind} {pathlib.PurePath(self.path).name or self.path}"


def render(parts: list[Part]) -> str:
    """Makes the page.

    Args:
        parts: its parts.

    Returns:
        The HTML.
    """
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
    # Names of files need not be text.
    return str(text).encode("utf-8", "replace").decode("utf-8")
