"""The rows that are looked up most: their share of all lookups."""

from __future__ import annotations

import collections
from collections.abc import Mapping

import numpy as np

from tfrs_embed.checkpoint.rows import FREQUENCY
from tfrs_embed.tools.conversion.contents import Column, Contents
from tfrs_embed.tools.monitoring.reports import top_shares
from tfrs_embed.tools.report import pictures
from tfrs_embed.tools.report.page import Section, percent, section

_TEXT = (
    "Shares of the lookups of keys with rows that go to those looked up most, "
    "by the table's own counters."
)


def counted_keys(contents: Contents) -> Section | None:
    """Returns the section on a checkpoint's tables with `DynamicKeys`.

    None if no table has lookups. The tables' counters are read block by block.
    """
    curves = {
        table.path or "table": _curve(table.counters[FREQUENCY])
        for table in contents.tables
        if FREQUENCY in table.counters
    }
    curves = {table: curve for table, curve in curves.items() if curve}
    if not curves:
        return None
    rows = [
        {
            "table": table,
            **{f"top {percent(k)}": percent(v) for k, v in curve.items()},
        }
        for table, curve in curves.items()
    ]
    return section("Hot rows", [picture(curves)], rows, text=_TEXT)


def _curve(frequency: Column) -> dict[float, float]:
    keys: collections.Counter[int] = collections.Counter()
    for _, block in frequency.blocks(lambda size: None):
        found = np.unique(block, return_counts=True)
        lookups, number = (each.tolist() for each in found)
        keys.update(dict(zip(lookups, number, strict=True)))
    return top_shares(
        np.array(list(keys), np.int64),
        frequency.shape[0],
        np.array(list(keys.values()), np.int64),
    )


def picture(curves: Mapping[str, Mapping[float, float]]) -> str:
    """Draws the share of lookups that the rows looked up most get.

    Args:
        curves: by table, by the share of its rows the share of lookups.

    Returns:
        The figure's HTML; "" if there are no curves.
    """
    return pictures.lines(
        "Share of lookups that go to the rows looked up most",
        curves,
        percent,
        x_label="rows, from the one looked up most",
        x_text=percent,
        log_x=True,
        least=0,
    )
