"""Tables of a checkpoint or of an exported model, measured block by block."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import numpy as np

from tfrs_embed.checkpoint.rows import FREQUENCY, SCALE
from tfrs_embed.compat import progress
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion.contents import Column, Contents, Table
from tfrs_embed.tools.conversion.statistics import measure
from tfrs_embed.tools.monitoring.reports import top_shares


def measure_tables(contents: Contents) -> dict[str, dict[str, Any]]:
    """Reads all tables.

    Returns:
        By the table's name, its sizes and the statistics of its values, the
        largest table first. Tables of one name are named by their paths.
    """
    names = collections.Counter(table.name for table in contents.tables)
    names.update(["", "table"])  # Each DynamicEmbedding has a "table".
    total = sum(c.nbytes for t in contents.tables for c in t.columns.values())
    name = os.path.basename(contents.path.rstrip("/"))
    with progress.Task("Reading", f"'{name}'", total) as task:
        found = {
            table.name if names[table.name] == 1 else table.path or "table": (
                _measure(table, task.advance)
            )
            for table in contents.tables
        }
    return dict(sorted(found.items(), key=lambda each: -each[1]["bytes"]))


def _measure(table: Table, advance: Callable[[int], None]) -> dict[str, Any]:
    rows, dim = table.shape
    parameters = table.columns[PARAMETERS]
    statistics = measure(parameters, advance)
    slots = {k: v for k, v in table.columns.items() if k != PARAMETERS}
    untouched = [
        _untouched(slot, advance) for k, slot in slots.items() if k != SCALE
    ]
    slot_bytes = sum(slot.nbytes for slot in slots.values())
    record = {
        "by": "keys" if table.keys else "ids",
        "rows": rows,
        "dim": dim,
        "dtype": parameters.dtype.name,
        "slots": ", ".join(slots) or "none",
        "row_bytes": parameters.nbytes,
        "slot_bytes": slot_bytes,
        "bytes": parameters.nbytes + slot_bytes,
        **dataclasses.asdict(statistics),
        "zero_share": statistics.zero_rows / max(1, rows),
        "untouched_share": min(untouched) / max(1, rows) if untouched else None,
    }
    if FREQUENCY in table.counters:
        record["keys"] = {"top_shares": _top_shares(table.counters[FREQUENCY])}
    return record


def _untouched(slot: Column, advance: Callable[[int], None]) -> int:
    """Counts the rows of a slot that no update has changed.

    A checkpoint doesn't hold the slot's initial value. It is taken to be zero,
    or, of slots that add squares up, the least row of one number.
    """
    least, count = math.inf, 0

    def count_least(rows: np.ndarray) -> None:
        nonlocal least, count
        same = rows[(rows == rows[:, :1]).all(1), 0]
        if not same.size:
            return
        smallest = float(same.min())
        if smallest < least:
            least, count = smallest, 0
        if smallest == least:
            count += int(np.count_nonzero(same == least))

    zero_rows = measure(slot, advance, count_least).zero_rows
    if zero_rows:
        return zero_rows
    # In a slot of one number a row, some row always has the least number.
    one_number = math.prod(slot.shape[1:]) == 1
    return 0 if least < 0 or (one_number and count == 1) else count


def _top_shares(frequency: Column) -> dict[float, float]:
    keys: collections.Counter[int] = collections.Counter()
    for _, block in frequency.blocks(lambda size: None):
        lookups, number = np.unique(block, return_counts=True)
        keys.update(dict(zip(lookups.tolist(), number.tolist(), strict=True)))
    return top_shares(
        np.array(list(keys), np.int64),
        frequency.shape[0],
        np.array(list(keys.values()), np.int64),
    )
