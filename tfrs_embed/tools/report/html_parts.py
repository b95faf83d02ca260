"""Parts of pages of HTML: style, tables, figures.

A page needs no other file. Its colours, light or dark, are variables of
`STYLE`, which pictures use. Wide tables scroll in their own boxes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from html import escape

#: The variables with the colours of pictures' series, in order.
SERIES = tuple(f"var(--series-{i})" for i in range(8))

STYLE = """
:root { color-scheme: light dark; --ink: #1d2733; --paper: #fff;
  --faint: #5b6775; --line: #d3dae2; --box: #f4f6f9; --alarm: #b03030;
  --series-0: #2f6fb0; --series-1: #c8641f; --series-2: #3f8f45;
  --series-3: #8550a0; --series-4: #12868a; --series-5: #c23b6b;
  --series-6: #8a7a1c; --series-7: #77828e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e8ee; --paper: #14191f;
  --faint: #9aa7b5; --line: #39434e; --box: #1d242c; --alarm: #f07878;
  --series-0: #6ea8e6; --series-1: #f0995a; --series-2: #74c47a;
  --series-3: #be8fd6; --series-4: #4fc3c7; --series-5: #f07fa6;
  --series-6: #cdbb55; --series-7: #94a0ac; } }
* { box-sizing: border-box; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; padding: 0 1em;
  max-width: 66em; color: var(--ink); background: var(--paper);
  overflow-wrap: anywhere; }
h1 { font-size: 1.5em; line-height: 1.25; } h2 { font-size: 1.3em; }
h3 { font-size: 1.1em; } h2, h3 { margin: 1.8em 0 0.6em; line-height: 1.3; }
a { color: var(--series-0); }
table { border-collapse: collapse; font-size: 0.9em; width: max-content;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.2em 0.7em; text-align: right; vertical-align: top;
  white-space: nowrap; }
th { border-bottom: 2px solid var(--ink); }
tbody tr + tr td { border-top: 1px solid var(--line); }
tbody tr.total td { border-top: 2px solid var(--ink); }
.text { text-align: left; }
td.text { white-space: normal; max-width: 26em; overflow-wrap: break-word; }
@media (max-width: 40em) { td.text { max-width: 14em; } }
.wide { overflow-x: auto; max-width: 100%; margin: 0.6em 0; }
.pictures { display: grid; gap: 1em 2em;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26em), 1fr)); }
figure { margin: 0.6em 0; min-width: 0; max-width: 32em; }
figcaption { color: var(--faint); margin-bottom: 0.3em; }
svg { display: block; max-width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 0 1.2em;
  margin: 0.3em 0 0; padding: 0; font-size: 0.85em; }
.legend i { display: inline-block; width: 0.8em; height: 0.8em;
  margin-right: 0.4em; border-radius: 2px; }
"""


def table(
    head: Sequence[str],
    lines: Iterable[Sequence[str]],
    left: Collection[str],
    total: Sequence[str] | None = None,
) -> str:
    """Returns a table in a box that scrolls; the arguments of `text_table`."""
    classes = [' class="text"' if name in left else "" for name in head]

    def line(values: Sequence[str], tag: str) -> str:
        return "".join(
            f"<{tag}{kind}>{escape(value)}</{tag}>"
            for value, kind in zip(values, classes, strict=True)
        )

    rows = "".join(f"<tr>{line(each, 'td')}</tr>\n" for each in lines)
    if total is not None:
        rows += f'<tr class="total">{line(total, "td")}</tr>\n'
    # With a tabindex, a keyboard can scroll the box.
    return (
        '<div class="wide" tabindex="0"><table>\n'
        f"<thead><tr>{line(head, 'th')}</tr></thead>\n"
        f"<tbody>\n{rows}</tbody>\n</table></div>\n"
    )


def figure(svg: str, caption: str, series: Sequence[str] = ()) -> str:
    """Returns a picture, its caption and a legend, if colours have names."""
    entries = "".join(
        f'<li><i style="background: {SERIES[i % len(SERIES)]}"></i>'
        f"{escape(name)}</li>"
        for i, name in enumerate(series)
    )
    legend = f'<ul class="legend">{entries}</ul>\n' if entries else ""
    return (
        f"<figure>\n<figcaption>{escape(caption)}</figcaption>\n{svg}{legend}"
        "</figure>\n"
    )


def pictures(figures: Iterable[str]) -> str:
    """Returns the HTML of figures beside each other; "" without figures."""
    content = "".join(figures)
    return f'<div class="pictures">\n{content}</div>\n' if content else ""
