"""The picture of the rows that are looked up most."""

from __future__ import annotations

from collections.abc import Mapping

from tfrs_embed.tools.report import pictures, values


def hot_rows(curves: Mapping[str, Mapping[float, float]]) -> str:
    """Draws the share of lookups that the rows looked up most get.

    Args:
        curves: by table, by the share of its rows the share of lookups.

    Returns:
        The figure's HTML; "" if there are no curves.
    """
    places = sorted({share for curve in curves.values() for share in curve})
    return pictures.lines(
        "Share of lookups that go to the rows looked up most",
        places,
        {name: [c.get(p) for p in places] for name, c in curves.items()},
        values.percent,
        x_label="rows, from the one looked up most",
        x_names=[values.percent(place) for place in places],
        log_x=True,
        least=0,
    )
