"""The tables of Keras's Embedding layers in a checkpoint, and of ours."""

from __future__ import annotations

import dataclasses

import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.configs.tables import DTYPES
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion.contents import Table
from tfrs_embed.tools.conversion.finder import Finder
from tfrs_embed.tools.conversion.keras_slots import KerasSlots
from tfrs_embed.tools.conversion.objects import Objects, Variables, column

#: The attribute that tf_keras's layer has, and ours; and that of Keras 3's.
_NAMES = ("embeddings", "_embeddings")
#: The attribute with the layers of our layers' small tables, in SavedModels.
_OUR_SMALL_TABLES = "_keras_layers"


class KerasFinder(Finder):
    """Finds the tables of Embedding layers; see the base class."""

    def __init__(
        self, reader: BundleReader, variables: Variables, objects: Objects
    ) -> None:
        super().__init__(reader, variables, objects)
        slots = KerasSlots(reader, variables, objects)
        for number, layer in objects.paths.items():
            if layer.split("/")[-2:-1] == [_OUR_SMALL_TABLES]:
                continue
            for name in _NAMES:
                path = objects.variables.get(
                    objects.nodes[number].get(name, -1), ""
                )
                if path in self.taken or not _is_table(path, variables):
                    continue
                dtype = variables[path][1]
                if dtype.name not in DTYPES:
                    self.notes.append(
                        f"'{path}' is {dtype.name}, read as float32."
                    )
                    dtype = tf.float32
                found = slots.of(path)
                paths = {PARAMETERS: path, **found.slots}
                columns = {
                    each: dataclasses.replace(
                        column(reader, of_column), dtype=dtype
                    )
                    for each, of_column in paths.items()
                }
                self.tables.append(Table(layer, "", columns, of_keras=True))
                self.taken |= set(paths.values())
                self.notes += found.notes
                step, counters = slots.step(set(found.counters))
                if step is not None:
                    self.steps[layer] = step
                    self.taken |= counters


def _is_table(path: str, variables: Variables) -> bool:
    if path not in variables:
        return False
    shape, dtype = variables[path]
    return len(shape) == 2 and shape[1] > 0 and dtype.is_floating
