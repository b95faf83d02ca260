"""Which store keeps a table."""

from __future__ import annotations

from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.storage.memory import MemoryRows
from tfrs_embed.storage.row_store import RowStore


def kind_of(table: TableSpec) -> type[RowStore]:
    """Returns the class of the store that keeps a table's rows."""
    del table  # All tables are in memory.
    return MemoryRows
