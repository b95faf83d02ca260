"""The error for tables that don't fit, with what would fit."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.tools.planner.candidates import Demand
from tfrs_embed.tools.planner.search import Found, Search


class TablesDontFit(ValueError):
    """The tables don't fit in the replicas' memory."""


def does_not_fit(search: Search, found: Found) -> TablesDontFit:
    """Returns the error of a search that found nothing that fits.

    `found` is the choice that is nearest to fitting.
    """
    limit = search.limit
    assert limit is not None
    most = min(found.most, search.best(["row"]).most)
    largest = max(search.demands, key=lambda demand: demand.bytes)
    total = sum(demand.bytes for demand in search.demands)
    message = (
        f"The tables don't fit. With their slots they take "
        f"{_size(total)}, the largest, '{largest.name}', "
        f"{_size(largest.bytes)}; spread over {search.replicas} replicas they "
        f"need {_size(most)} on one of them, {_size(most - limit)} more than "
        f"memory_per_replica={limit} ({format_bytes(limit)}). "
        f"memory_per_replica={most} would do"
    )
    replicas = _enough_replicas(search.demands, limit)
    if replicas is None:
        message += (
            "; no number of replicas would, as some tables can't be spread any "
            "further."
        )
    else:
        message += f", or {replicas:,} replicas, sharded by row."
    return TablesDontFit(message)


def _size(size: int) -> str:
    return f"{size} bytes ({format_bytes(size)})"


def _enough_replicas(demands: Sequence[Demand], limit: int) -> int | None:
    """The fewest replicas on which tables by row fit, or None.

    Tables whose placement is kept are not spread.
    """

    def needed(replicas: int) -> int:
        total = 0
        for demand in demands:
            spread = demand.kept in (None, "row")
            rows = -(-demand.rows // replicas) if spread else demand.rows
            total += rows * (demand.bytes // demand.rows)
            if demand.kept == "row":
                total += demand.hot_bytes
        return total

    numbers = range(1, max(demand.rows for demand in demands) + 1)
    index = bisect.bisect_left(
        numbers, True, key=lambda replicas: needed(replicas) <= limit
    )
    return numbers[index] if index < len(numbers) else None
