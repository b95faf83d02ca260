"""The tables of Embedding layers, of Keras and of this package."""

from __future__ import annotations

from tfrs_embed.configs.tables import DTYPES
from tfrs_embed.tools.conversion.contents import Contents
from tfrs_embed.tools.conversion.keras_slots import KerasSlots
from tfrs_embed.tools.conversion.objects import SavedObjects

#: The variable's attribute in tf_keras's layer and this package's, and in
#: Keras 3's.
_NAMES = ("embeddings", "_embeddings")
#: The attribute with the layers of this package's small tables, in SavedModels.
_OUR_SMALL_TABLES = "_keras_layers"


def find_tables(saved: SavedObjects, found: Contents) -> None:
    """Finds the tables of Embedding layers."""
    slots = KerasSlots(saved)
    for number, layer in saved.paths.items():
        if layer.split("/")[-2:-1] == [_OUR_SMALL_TABLES]:
            continue
        for name in _NAMES:
            variable = saved.nodes[number].get(name, -1)
            column = saved.columns.get(variable)
            if column and column.is_table and column.name not in found.taken:
                slots.add_table(
                    found, layer, "", variable, dtypes=DTYPES, of_keras=True
                )
    slots.add_steps(found)
