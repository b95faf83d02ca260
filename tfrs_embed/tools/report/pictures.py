"""Pictures of bars and lines, as SVG in the colours of the page."""

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

from tfrs_embed.tools.report.html_parts import SERIES, figure

#: The most bars, or lines, that a picture has room for.
MOST_BARS = 15
MOST_LINES = len(SERIES)

# In points. A page shows pictures in pixels, or as narrow as its window.
_WIDTH = 360
_POINTS_PER_INCH = 72
_MOST_LETTERS = 22
_MOST_NAMES = 6

# The colours that matplotlib draws in; the page's variables replace them.
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
# matplotlib's settings are global.
_lock = threading.Lock()

Format = Callable[[float], str]


def bars(
    caption: str,
    values: Mapping[str, Sequence[float]],
    text: Format,
    parts: Sequence[str] = (),
) -> str:
    """Draws a bar for each name, of a part for each of the name's values.

    Args:
        caption: the caption.
        values: the values by name, from the top; the first `MOST_BARS` names
            are drawn.
        text: formats a bar's length.
        parts: the names of the parts, for the legend.

    Returns:
        The figure's HTML; "" if there are no names.
    """
    if not values:
        return ""
    shown = dict(list(values.items())[:MOST_BARS])
    lengths = [math.fsum(each) for each in shown.values()]
    most = max(lengths) or 1.0

    def draw(axes: Any) -> None:
        places = range(len(shown))
        left = [0.0] * len(shown)
        for colour, part in zip(
            _COLOURS, zip(*shown.values(), strict=True), strict=False
        ):
            axes.barh(places, part, 0.7, left, color=colour)
            left = [a + b for a, b in zip(left, part, strict=True)]
        for place, length in enumerate(lengths):
            axes.text(
                length + most * 0.02, place, text(length), va="center_baseline"
            )
        axes.set_yticks(places, [_shorten(name) for name in shown])
        axes.tick_params("y", length=0)
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.set_xlim(0, most * 1.3)
        axes.set_ylim(len(shown) - 0.4, -0.6)

    if hidden := len(values) - len(shown):
        caption += f" (without {hidden:,} more)"
    return figure(_draw(caption, 18 * len(shown) + 12, draw), caption, parts)


def lines(
    caption: str,
    series: Mapping[str, Mapping[Any, float | None]],
    text: Format,
    *,
    x_label: str = "",
    x_text: Format | None = None,
    log_x: bool = False,
    least: float | None = None,
) -> str:
    """Draws a line for each series.

    Args:
        caption: the caption.
        series: by name, y by x, None if it is unknown; the first `MOST_LINES`
            are drawn.
        text: formats y.
        x_label: the name of the x axis.
        x_text: formats x; None: as a number.
        log_x: whether the x axis is logarithmic.
        least: the lower end of the y axis; None: it follows from the values.

    Returns:
        The figure's HTML; "" if no value is known.
    """
    known = {
        name: [(x, y) for x, y in points.items() if y is not None]
        for name, points in series.items()
        if any(y is not None for y in points.values())
    }
    if not known:
        return ""
    shown = dict(list(known.items())[:MOST_LINES])
    places = sorted({x for points in series.values() for x in points})
    from matplotlib.ticker import LogLocator, MaxNLocator

    def draw(axes: Any) -> None:
        for colour, points in zip(_COLOURS, shown.values(), strict=False):
            axes.plot(
                *zip(*sorted(points), strict=True),
                color=colour,
                marker="o" if len(places) <= 40 else None,
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
        if x_text is not None:
            # Not all names have room.
            named = places[:: -(-len(places) // _MOST_NAMES)]
            axes.set_xticks(named, [_shorten(x_text(x), 12) for x in named])
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
    """Draws a picture of a height in points; returns SVG for a page."""
    import matplotlib
    from matplotlib.figure import Figure

    written = io.StringIO()
    with _lock, matplotlib.rc_context(_SETTINGS), warnings.catch_warnings():
        # The page's fonts may have letters that matplotlib's font lacks.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        size = (_WIDTH / _POINTS_PER_INCH, height / _POINTS_PER_INCH)
        picture = Figure(size, layout="constrained")
        draw(picture.add_subplot())
        picture.savefig(written, format="svg", transparent=True)
    return _for_page(written.getvalue(), label)


def _for_page(svg: str, label: str) -> str:
    """Removes metadata and styles from SVG; sets colours, ids and size."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.S)
    svg = re.sub(r"<style.*?</style>", "", svg, flags=re.S)
    # Ids must differ from those of the page's other pictures.
    used = set(re.findall(r'(?:url\(|href=")#([^)"]+)', svg))
    mark = f"{zlib.crc32((label + svg).encode('utf-8', 'replace')):x}"
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


def _shorten(name: str, most: int = _MOST_LETTERS) -> str:
    """Returns the end of a name: paths often begin alike."""
    name = "".join(c if c.isprintable() else " " for c in name)
    return name if len(name) <= most else "…" + name[1 - most :]
