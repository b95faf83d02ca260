"""How often the keys of tables in a checkpoint were looked up."""

from __future__ import annotations

import collections

import numpy as np

from tfrs_embed.checkpoint.bundle import blocks
from tfrs_embed.checkpoint.rows import FREQUENCY
from tfrs_embed.tools.conversion.contents import Column, Contents
from tfrs_embed.tools.monitoring.reports import top_shares_of


def curves(contents: Contents) -> dict[str, dict[float, float]]:
    """Reads how often keys were looked up, where a checkpoint has it.

    Args:
        contents: the checkpoint's.

    Returns:
        By the table's path, by a share of its keys, the share of the lookups
        that go to those looked up most.
    """
    found = {}
    for table in contents.tables:
        if FREQUENCY in table.counters:
            curve = _curve(table.counters[FREQUENCY])
            if curve:
                found[table.path or "table"] = curve
    return found


def _curve(frequency: Column) -> dict[float, float]:
    rows: collections.Counter[int] = collections.Counter()
    for start, size in blocks(frequency.shape, frequency.dtype):
        block = frequency.read(start, size)
        lookups, number = np.unique(block, return_counts=True)
        rows.update(dict(zip(lookups.tolist(), number.tolist(), strict=True)))
    lookups = np.array(sorted(rows), np.int64)
    number = np.array([rows[each] for each in lookups.tolist()], np.int64)
    return top_shares_of(lookups, number, frequency.shape[0])
