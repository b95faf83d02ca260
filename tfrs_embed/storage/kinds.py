"""The store that keeps tables."""

from __future__ import annotations

from tfrs_embed.storage.memory import MemoryRows
from tfrs_embed.storage.row_store import RowStore


def make_store(device: str | None) -> RowStore:
    """Returns a store of rows on a device; see `RowStore`."""
    return MemoryRows(device)
