"""The tables of keras_rs's DistributedEmbedding, off-TPU, in a checkpoint.

There a table is a Keras layer's variable, which the model's optimizer trains.
Keras tracks it, TensorFlow does not: it is in a checkpoint as one of the
optimizer's, and in a SavedModel as the layer's too. The path that Keras gives
it, "<layer>/<table>/embeddings", names it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion.contents import Table
from tfrs_embed.tools.conversion.finder import Finder
from tfrs_embed.tools.conversion.keras_slots import KerasSlots, Trained
from tfrs_embed.tools.conversion.objects import (
    VALUE,
    Objects,
    Variables,
    column,
)

#: The attribute of the layer that holds the layers of its tables.
LAYERS = "_default_device_embedding_layers"
_TABLE = "_embeddings"
# Keras's names of layers that were given none, and what is behind them.
_DEFAULT = re.compile(r"(distributed_embedding(?:_\d+)?)_(.+)")


class KerasRsFinder(Finder):
    """Finds keras_rs's tables in a checkpoint; see the base class.

    Args:
        ours: tables of this package's layers. Keras 3's optimizers have the
            small ones a second time.
    """

    def __init__(
        self,
        reader: BundleReader,
        variables: Variables,
        objects: Objects,
        ours: Sequence[Table] = (),
    ) -> None:
        super().__init__(reader, variables, objects)
        self._ours = ours
        self._slots = KerasSlots(reader, variables, objects)
        for variable in self._candidates():
            self._find(variable)

    def _candidates(self) -> list[int]:
        """The variables that keras_rs's layers have, or only optimizers do."""
        nodes = self._objects.nodes
        of_layers = {
            c[name]
            for c in nodes
            for name in (_TABLE, "embeddings")
            if name in c
        }
        of_keras_rs = {
            nodes[reduce][_TABLE]
            for children in nodes
            if LAYERS in children
            for reduce in nodes[children[LAYERS]].values()
            if _TABLE in nodes[reduce]
        }
        return sorted(of_keras_rs | (self._slots.trained.keys() - of_layers))

    def _find(self, variable: int) -> None:
        path = self._path(variable)
        if path is None:
            return
        trained = self._slots.of_keras_3(variable)
        place = self._place(path, trained)
        dtype = self._variables[path][1]
        if place is None or not dtype.is_floating:
            return
        layer, name = place
        if self._is_ours(f"{layer}/{name}", self._variables[path][0]):
            return
        if dtype != tf.float32:
            self.notes.append(f"'{path}' is {dtype.name}, read as float32.")
        self.notes += trained.notes
        paths = {PARAMETERS: path, **trained.slots}
        columns = {each: column(self._reader, paths[each]) for each in paths}
        self.taken |= set(paths.values())
        self.tables.append(Table(layer, name, columns))
        step, counters = self._slots.step(set(trained.counters))
        if step is not None:
            self.steps[layer] = step
            self.taken |= counters

    def _is_ours(self, path: str, shape: Sequence[int]) -> bool:
        """Whether a path ends as those of our small tables do, and is one."""
        return any(
            list(table.shape) == list(shape)
            and path.replace("/", "_").endswith(f"{table.name}_{table.name}")
            for table in self._ours
        )

    def _place(self, path: str, trained: Trained) -> tuple[str, str] | None:
        """The layer and the name of a variable's table, if it is one.

        Args:
            path: the variable's path.
            trained: what its optimizer has for it.
        """
        *layer, name, last = self._objects.full_names[path + VALUE].split("/")
        if last != "embeddings":
            return None
        if layer:
            return "/".join(layer), name
        # Of a model of its own class Keras gives it the model's name alone. The
        # slots' names have all of them: "<optimizer>/<model>_<layer>_<table>_
        # embeddings_<slot>".
        for slot in trained.slots.values():
            full = self._objects.full_names[slot + VALUE].rpartition("/")[2]
            there, found, _ = full.rpartition("_embeddings_")
            if found and there.startswith(f"{name}_"):
                there = there.removeprefix(f"{name}_")
                if known := _DEFAULT.match(there):
                    return f"{name}/{known[1]}", known[2]
                self.notes.append(
                    f"'{path}' is a table of keras_rs's in the model '{name}'. "
                    f"'{there}' is the name of its layer and its own."
                )
                return name, there
        place = path.rpartition("/")[2]
        self.notes.append(
            f"'{path}' is a table of keras_rs's in the model '{name}', whose "
            f"name is not in the checkpoint: it is called '{place}', its place "
            "among what the optimizer trains."
        )
        return name, place

    def _path(self, node: int) -> str | None:
        """The path of a node that is a variable [rows, dim]; else None."""
        path = self._objects.variables.get(node, "")
        shape, _ = self._variables.get(path, ([], None))
        return path if len(shape) == 2 and shape[1] else None
