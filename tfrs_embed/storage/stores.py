"""Chooses what holds the rows of an engine's tables.

No other module names an implementation of `RowStore`. A new one is a class, and
a line in `STORES` for what a table declares to have it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from tfrs_embed.configs.dynamic_keys import DynamicKeys
from tfrs_embed.configs.file_storage import FileStorage
from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.storage.memory import MemoryRows
from tfrs_embed.storage.row_store import RowStore

#: The module and the class of a store, by the type of a table's `storage`, or
#: `DynamicKeys` for a table with keys. Imported when needed.
STORES: dict[type, tuple[str, str]] = {
    FileStorage: ("tfrs_embed.storage.mapped_files", "FileRows"),
    DynamicKeys: ("tfrs_embed.storage.keyed_rows", "KeyedRows"),
}


def store_of(tables: Sequence[TableSpec], device: str | None) -> RowStore:
    """Makes the store of tables on a device; None: TensorFlow's choice.

    The tables all have keys, or none has. Some may have a storage of one type,
    which the store keeps beside those without.
    """
    kinds = {
        DynamicKeys if t.keys is not None else type(t.storage) for t in tables
    }
    kinds -= {type(None)}
    if not kinds:
        return MemoryRows(device)
    [kind] = kinds
    module, name = STORES[kind]
    store: RowStore = getattr(importlib.import_module(module), name)(device)
    return store
