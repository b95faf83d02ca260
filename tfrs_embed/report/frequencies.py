"""How often the keys of tables in a checkpoint were looked up."""

from __future__ import annotations

import collections

import numpy as np

from tfrs_embed.checkpoint.bundle import BundleReader, blocks
from tfrs_embed.checkpoint.conversion.contents import Contents, Table
from tfrs_embed.checkpoint.conversion.objects import VALUE, escape
from tfrs_embed.checkpoint.rows import FREQUENCY
from tfrs_embed.monitoring.reports import top_shares_of


def curves(contents: Contents) -> dict[str, dict[float, float]]:
    """Reads how often keys were looked up, where a checkpoint has it.

    Args:
        contents: the checkpoint's.

    Returns:
        By the table's path, by a share of its keys, the share of the lookups
        that go to those looked up most.
    """
    there = {other.name for other in contents.others}
    found = {}
    for table in contents.tables:
        name = _name(table)
        if table.keys is not None and name in there:
            curve = _curve(BundleReader(contents.path), name + VALUE)
            if curve:
                found[table.path or "table"] = curve
    return found


def _name(table: Table) -> str:
    parts = ("tables", escape(table.name)) if table.name else ("table",)
    return "/".join(p for p in (table.layer, *parts, FREQUENCY) if p)


def _curve(reader: BundleReader, key: str) -> dict[float, float]:
    shape = reader.shapes[key]
    rows: collections.Counter[int] = collections.Counter()
    for start, size in blocks(shape, reader.dtypes[key]):
        block = reader.read_rows(key, start, size).numpy()
        lookups, number = np.unique(block, return_counts=True)
        rows.update(dict(zip(lookups.tolist(), number.tolist(), strict=True)))
    lookups = np.array(sorted(rows), np.int64)
    number = np.array([rows[each] for each in lookups.tolist()], np.int64)
    return top_shares_of(lookups, number, shape[0])
