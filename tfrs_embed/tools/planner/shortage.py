"""What tables lack that don't fit, for the error that says so."""

from __future__ import annotations

from collections.abc import Sequence

from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.tools.planner.candidates import Demand
from tfrs_embed.tools.planner.search import Search


class TablesDontFit(ValueError):
    """The tables don't fit; the text says by how much, and what would."""


def does_not_fit(search: Search) -> TablesDontFit:
    """Says by how much the tables don't fit, and what would.

    Args:
        search: a search that found nothing.

    Returns:
        The error.
    """
    limit = search.limit
    assert limit is not None
    most = search.tightest().most
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
    if replicas is not None:
        return TablesDontFit(
            f"{message}, or {replicas:,} replicas, sharded by row."
        )
    return TablesDontFit(
        f"{message}; no number of replicas would, as some tables can't be "
        "spread any further."
    )


def _size(size: int) -> str:
    return f"{size} bytes ({format_bytes(size)})"


def _enough_replicas(demands: Sequence[Demand], limit: int) -> int | None:
    """The least number on which tables fit that are sharded by row.

    Those whose placement is kept are as they are.

    Args:
        demands: the tables.
        limit: bytes that a replica may hold.

    Returns:
        The number; None: there is none.
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

    low, high = 1, max(demand.rows for demand in demands)
    if needed(high) > limit:
        return None
    while low < high:
        middle = (low + high) // 2
        if needed(middle) <= limit:
            high = middle
        else:
            low = middle + 1
    return low
