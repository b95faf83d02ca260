"""The tables of keras_rs's DistributedEmbedding, off-TPU, in a checkpoint.

Each table is the variable of a Keras layer, and the model's optimizer trains
it. Keras tracks the variable, TensorFlow doesn't: a checkpoint has it among the
optimizer's, and a SavedModel among the layer's too. The variable's path in
Keras, "<layer>/<table>/embeddings", has the table's name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from tfrs_embed.tools.conversion.contents import Contents
from tfrs_embed.tools.conversion.keras_slots import KerasSlots
from tfrs_embed.tools.conversion.objects import SavedObjects

#: The attribute of the layer that holds the layers of its tables.
LAYERS = "_default_device_embedding_layers"
_TABLE = "_embeddings"
# A layer's default name in Keras, and the table's name.
_DEFAULT = re.compile(r"(distributed_embedding(?:_\d+)?)_(.+)")


def find_tables(saved: SavedObjects, found: Contents) -> None:
    """Finds keras_rs's tables."""
    slots = KerasSlots(saved)
    for variable in _candidates(saved, slots):
        column = saved.columns.get(variable)
        if not column or not column.is_table or column.name in found.taken:
            continue
        place = _place(saved, found, variable, slots.slots_of(variable))
        if place is None or _is_ours(found, "/".join(place), column.shape):
            continue
        slots.add_table(found, *place, variable)
    slots.add_steps(found)


def _candidates(saved: SavedObjects, slots: KerasSlots) -> list[int]:
    """The variables of keras_rs's layers, and of optimizers and no layer."""
    nodes = saved.nodes
    of_layers = {
        children[name]
        for children in nodes
        for name in (_TABLE, "embeddings")
        if name in children
    }
    of_keras_rs = {
        nodes[reduce][_TABLE]
        for children in nodes
        if LAYERS in children
        for reduce in nodes[children[LAYERS]].values()
        if _TABLE in nodes[reduce]
    }
    return sorted(of_keras_rs | (slots.trained - of_layers))


def _is_ours(found: Contents, path: str, shape: tuple[int, ...]) -> bool:
    """Whether a path and a shape are those of a small table of this package.

    Keras 3's optimizers have small tables a second time.
    """
    return any(
        table.shape == shape
        and path.replace("/", "_").endswith(f"{table.name}_{table.name}")
        for table in found.tables
    )


def _place(
    saved: SavedObjects,
    found: Contents,
    variable: int,
    slots: Mapping[str, int],
) -> tuple[str, str] | None:
    """The layer and the name of a variable's table; None: it is no table.

    A guessed name gets a note.
    """
    *layer, name, last = saved.full_names[variable].split("/")
    if last != "embeddings":
        return None
    if layer:
        return "/".join(layer), name
    # In a model of a class of its own the variable has the model's name alone.
    # The slots have all names: "<optimizer>/<model>_<layer>_<table>_embeddings_
    # <slot>".
    path = saved.columns[variable].name
    for slot in slots.values():
        full = saved.full_names[slot].rpartition("/")[2]
        there, ends, _ = full.rpartition("_embeddings_")
        if ends and there.startswith(f"{name}_"):
            there = there.removeprefix(f"{name}_")
            if known := _DEFAULT.match(there):
                return f"{name}/{known[1]}", known[2]
            found.notes.append(
                f"'{path}' is a table of keras_rs's in the model '{name}'. "
                f"'{there}' is its layer's name and its own, joined by '_'."
            )
            return name, there
    place = path.rpartition("/")[2]
    found.notes.append(
        f"'{path}' is a table of keras_rs's in the model '{name}', whose name "
        f"is not in the checkpoint: it is called '{place}', its position among "
        "the variables that the optimizer trains."
    )
    return name, place
