"""Pictures of bars and lines, which matplotlib draws as SVG."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tfrs_embed.compat.text_table import printable

#: The most bars, or lines, that a picture has room for.
MOST_BARS = 15
MOST_LINES = 8

# In inches.
_WIDTH = 5
_BAR = 0.25
_MOST_LETTERS = 22

_SETTINGS: Any = {
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 9,
    "svg.fonttype": "none",  # The browser's fonts have more letters.
    "svg.hashsalt": "report",  # Ids are the same each time.
    "text.parse_math": False,  # Names may have dollars.
}

Format = Callable[[float], str]


class Picture(NamedTuple):
    """A picture: its caption, and its URI, which holds the picture."""

    caption: str
    uri: str


def bars(caption: str, values: Mapping[str, float], text: Format) -> Picture:
    """Draws a bar for each name.

    Args:
        caption: the caption.
        values: the bars' lengths by name, from the top; the first `MOST_BARS`
            are drawn.
        text: formats a length.
    """
    shown = dict(list(values.items())[:MOST_BARS])

    def draw(axes: Any) -> None:
        names = [_shorten(name) for name in shown]
        drawn = axes.barh(range(len(shown)), list(shown.values()), 0.7)
        axes.bar_label(drawn, [text(v) for v in shown.values()], padding=3)
        axes.set_yticks(range(len(shown)), names)
        axes.invert_yaxis()
        axes.margins(x=0.25)
        axes.set_xticks([])

    return _figure(caption, len(values) - len(shown), _BAR * len(shown), draw)


def lines(
    caption: str,
    series: Mapping[str, Mapping[int, float]],
    text: Format,
    x_label: str,
) -> Picture:
    """Draws a line for each series.

    Args:
        caption: the caption.
        series: by name, y by x; the first `MOST_LINES` are drawn.
        text: formats y.
        x_label: the name of the x axis.
    """
    shown = dict(list(series.items())[:MOST_LINES])

    def draw(axes: Any) -> None:
        for name, points in shown.items():
            axes.plot(
                *zip(*points.items(), strict=True),
                marker=".",
                label=_shorten(name),
            )
        axes.set_xlabel(x_label)
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.yaxis.set_major_formatter(lambda value, _: text(value))
        axes.grid(axis="y", alpha=0.3)
        axes.figure.legend(loc="outside lower left", ncols=2, frameon=False)

    height = 2.5 + _BAR * len(shown) / 2
    return _figure(caption, len(series) - len(shown), height, draw)


def _figure(
    caption: str, hidden: int, height: float, draw: Callable[[Any], None]
) -> Picture:
    import matplotlib
    from matplotlib.figure import Figure

    if hidden:
        caption += f" (without {hidden:,} more)"
    written = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # The browser's fonts may have letters that matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        picture = Figure((_WIDTH, height + 0.1), layout="constrained")
        draw(picture.add_subplot())
        picture.savefig(
            written, format="svg", transparent=True, metadata={"Date": None}
        )
    data = base64.b64encode(written.getvalue()).decode()
    return Picture(caption, f"data:image/svg+xml;base64,{data}")


def _shorten(name: str) -> str:
    """Returns the end of a name: paths often begin alike."""
    name = printable(name)
    return (
        name if len(name) <= _MOST_LETTERS else "…" + name[1 - _MOST_LETTERS :]
    )
