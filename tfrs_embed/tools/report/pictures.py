"""Pictures: bars and lines, as SVG that has the colours of the page."""

from __future__ import annotations

import io
import math
import re
import threading
import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from tfrs_embed.tools.planner.html_parts import SERIES, figure

#: Names of more tables than these have no room in a picture.
MOST_BARS = 15
MOST_LINES = len(SERIES)

#: In points; a page shows it a third larger, or as narrow as it has to be.
_WIDTH = 360
_POINTS_PER_INCH = 72
_MOST_LETTERS = 22
_MOST_NAMES = 6

# matplotlib writes colours by number, which the page's variables then replace.
_INK, _FAINT = "#fe0100", "#fe0101"
_COLOURS = [f"#fe00{i:02x}" for i in range(len(SERIES))]
_VARIABLES = {
    _INK: "var(--ink)",
    _FAINT: "var(--line)",
    **dict(zip(_COLOURS, SERIES, strict=True)),
}
_SETTINGS: Any = {
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.family": "DejaVu Sans",  # matplotlib brings it, to measure text.
    "font.size": 9,
    "grid.color": _FAINT,
    "grid.linewidth": 0.5,
    "svg.fonttype": "none",  # The page's own font.
    "svg.hashsalt": "report",  # Ids are the same each time.
    "text.color": _INK,
    "text.parse_math": False,  # Names may have dollars.
    "xtick.color": _FAINT,
    "xtick.labelcolor": _INK,
    "ytick.color": _FAINT,
    "ytick.labelcolor": _INK,
}
# Settings are the process's.
_lock = threading.Lock()

Format = Callable[[float], str]


def bars(
    caption: str,
    names: Sequence[str],
    series: Mapping[str, Sequence[float]],
    text: Format,
) -> str:
    """Draws a bar for each name, made of a piece for each series.

    Args:
        caption: what it shows.
        names: the names, from the top; only the first have room.
        series: values by the series' names.
        text: writes a bar's length.

    Returns:
        The figure's HTML; "" if there are no names.
    """
    if not names:
        return ""
    shown = [_shorten(name) for name in names[:MOST_BARS]]
    lengths = [
        math.fsum(values[i] for values in series.values())
        for i in range(len(shown))
    ]
    most = max(lengths) or 1.0

    def draw(axes: Any) -> None:
        places = range(len(shown))
        left = [0.0] * len(shown)
        for colour, values in zip(_COLOURS, series.values(), strict=False):
            part = list(values[: len(shown)])
            axes.barh(places, part, 0.7, left, color=colour)
            left = [a + b for a, b in zip(left, part, strict=True)]
        for place, length in enumerate(lengths):
            axes.text(
                length + most * 0.02, place, text(length), va="center_baseline"
            )
        axes.set_yticks(places, shown)
        axes.tick_params("y", length=0)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.set_xlim(0, most * 1.3)
        axes.set_ylim(len(shown) - 0.4, -0.6)

    if hidden := len(names) - len(shown):
        caption += f" (without {hidden:,} more)"
    legend = list(series) if len(series) > 1 else []
    svg = _draw(caption, 18 * len(shown) + 12, draw)
    return figure(svg, caption, legend)


def lines(
    caption: str,
    x: Sequence[float],
    series: Mapping[str, Sequence[float | None]],
    text: Format,
    *,
    x_label: str = "",
    x_names: Sequence[str] | None = None,
    log_x: bool = False,
    least: float | None = None,
) -> str:
    """Draws a line for each series.

    Args:
        caption: what it shows.
        x: the places of the values.
        series: values by the series' names; None: there is none at that place.
            Only the first series have room.
        text: writes a value.
        x_label: what x is.
        x_names: names of the places; None: their numbers.
        log_x: whether x is shown by its logarithm.
        least: the least value that the picture has room for; None: that of the
            series.

    Returns:
        The figure's HTML; "" if there is no value.
    """
    known = {
        name: [math.nan if v is None else v for v in values]
        for name, values in series.items()
        if any(v is not None for v in values)
    }
    if not known:
        return ""
    shown = dict(list(known.items())[:MOST_LINES])
    from matplotlib.ticker import LogLocator, MaxNLocator

    def draw(axes: Any) -> None:
        for colour, values in zip(_COLOURS, shown.values(), strict=False):
            marker = "o" if len(x) <= 40 else None
            # A line goes on over what is not known.
            there = [i for i, v in enumerate(values) if not math.isnan(v)]
            axes.plot(
                [x[i] for i in there],
                [values[i] for i in there],
                color=colour,
                marker=marker,
                markersize=3,
                linewidth=1.5,
            )
        if log_x:
            axes.set_xscale("log")
            axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
            axes.minorticks_off()
        else:
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
            axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        if x_names is not None:
            # Not all of many have room.
            each = -(-len(x) // _MOST_NAMES)
            axes.set_xticks(
                x[::each], [_shorten(name, 12) for name in x_names[::each]]
            )
        axes.set_xlabel(x_label)
        axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.yaxis.set_major_formatter(lambda value, _: text(value))
        axes.grid(axis="y")
        axes.tick_params(length=0)
        axes.margins(y=0.08)
        if least is not None:
            axes.set_ylim(least, max(axes.get_ylim()[1], least + 1e-9))

    if hidden := len(known) - len(shown):
        caption += f" (without {hidden:,} more)"
    return figure(_draw(caption, 190, draw), caption, list(shown))


def _draw(label: str, height: float, draw: Callable[[Any], None]) -> str:
    """Draws axes of a height in points; returns SVG for a page."""
    import matplotlib
    from matplotlib.figure import Figure

    written = io.StringIO()
    with _lock, matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # Of letters that the font lacks by which text is measured.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        size = (_WIDTH / _POINTS_PER_INCH, height / _POINTS_PER_INCH)
        picture = Figure(size, layout="constrained")
        draw(picture.add_subplot())
        picture.savefig(written, format="svg", transparent=True)
    return _for_page(written.getvalue(), label)


def _for_page(svg: str, label: str) -> str:
    """Takes out what a page has no use for, and the fixed colours and size."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.S)
    # Ids are the page's, which has other pictures.
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg))
    mark = f"{_hash(label + svg):x}"
    svg = re.sub(
        r' id="([^"]*)"',
        lambda found: f' id="{mark}-{found[1]}"' if found[1] in used else "",
        svg,
    )
    svg = re.sub(r'(url\(|href=")#', rf"\g<1>#{mark}-", svg)
    svg = re.sub(r"font: [^;\"]*", "font: 9px system-ui, sans-serif", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, variable)
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)
    assert size is not None  # matplotlib writes it.
    width, height = (float(each) * 4 / 3 for each in size.groups())
    svg = re.sub(
        r"<svg[^>]*>",
        '<svg xmlns="http://www.w3.org/2000/svg" '
        'xmlns:xlink="http://www.w3.org/1999/xlink" '
        f'width="{width:.0f}" height="{height:.0f}" {size[0]} '
        f'role="img" aria-label="{escape(label)}">',
        svg,
        count=1,
    )
    return svg


def _hash(text: str) -> int:
    """A number that is the same in each process, for a text."""
    return zlib.crc32(text.encode("utf-8", "replace"))


def _shorten(name: str, most: int = _MOST_LETTERS) -> str:
    """A name's end, which differs where paths begin alike."""
    name = "".join(c if c.isprintable() else " " for c in name)
    return name if len(name) <= most else "…" + name[1 - most :]
