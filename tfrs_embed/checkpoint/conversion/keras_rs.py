"""The tables of keras_rs's DistributedEmbedding, off-TPU, in a checkpoint.

There a table is a Keras layer's variable, which the model's optimizer trains.
Keras tracks it, TensorFlow does not: it is in a checkpoint as one of the
optimizer's, and in a SavedModel as the layer's too. The path that Keras gives
it, "<layer>/<table>/embeddings", names it.
"""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.conversion.contents import Column, Table
from tfrs_embed.checkpoint.conversion.finder import Finder
from tfrs_embed.checkpoint.conversion.objects import (
    VALUE,
    Objects,
    Variables,
    column,
)

#: The attribute of the layer that holds the layers of its tables.
LAYERS = "_default_device_embedding_layers"
_TABLE = "_embeddings"
_TRAINED, _ITERATIONS = "_trainable_variables", "_iterations"
# The lists of slots of Keras 3's optimizers, in the order of the variables they
# train, and what the slots are here.
_SLOTS = {
    "_accumulators": "accumulators",
    "_linears": "linears",
    "_momentums": "momenta",
    "_velocities": "velocities",
    "momentums": "momenta",
}


class KerasRsFinder(Finder):
    """Finds keras_rs's tables in a checkpoint; see the base class."""

    def __init__(
        self, reader: BundleReader, variables: Variables, objects: Objects
    ) -> None:
        super().__init__(reader, variables, objects)
        # Of the variables that optimizers train, these and the place there.
        self._trained: dict[int, list[tuple[Mapping[str, int], str]]] = {}
        for children in objects.nodes:
            if children.keys() >= {_TRAINED, _ITERATIONS}:
                listed = objects.nodes[children[_TRAINED]]
                for place, variable in listed.items():
                    of_variable = self._trained.setdefault(variable, [])
                    of_variable.append((children, place))
        for variable in self._candidates():
            self._find(variable)

    def _candidates(self) -> list[int]:
        """The variables that keras_rs's layers have, or only optimizers do."""
        nodes = self._objects.nodes
        of_layers = {c[_TABLE] for c in nodes if _TABLE in c}
        of_keras_rs = {
            nodes[reduce][_TABLE]
            for children in nodes
            if LAYERS in children
            for reduce in nodes[children[LAYERS]].values()
            if _TABLE in nodes[reduce]
        }
        return sorted(of_keras_rs | (self._trained.keys() - of_layers))

    def _find(self, variable: int) -> None:
        path = self._path(variable)
        if path is None:
            return
        *layer, name, last = self._objects.full_names[path + VALUE].split("/")
        dtype = self._variables[path][1]
        if last != "embeddings" or not layer or not dtype.is_floating:
            return
        if dtype != tf.float32:
            self.notes.append(f"'{path}' is {dtype.name}, read as float32.")
        columns = {"parameters": self._column(path)}
        optimizers = self._trained.get(variable, [])
        if len(optimizers) == 1:
            children, place = optimizers[0]
            for slots, own in _SLOTS.items():
                listed = children.get(slots, variable)
                slot = self._path(self._objects.nodes[listed].get(place, -1))
                if slot and self._variables[slot] == self._variables[path]:
                    columns[own] = self._column(slot)
            self._find_step("/".join(layer), children[_ITERATIONS])
        elif optimizers:
            self.notes.append(
                f"'{path}' is trained by {len(optimizers)} optimizers: none's "
                "slots are taken."
            )
        self.tables.append(Table("/".join(layer), name, columns))

    def _find_step(self, layer: str, iterations: int) -> None:
        path = self._objects.variables.get(iterations, "")
        if path in self._variables:
            self.steps[layer] = int(self._reader.read(path + VALUE))
            self.taken.add(path)

    def _path(self, node: int) -> str | None:
        """The path of a node that is a variable [rows, dim]; else None."""
        path = self._objects.variables.get(node, "")
        shape, _ = self._variables.get(path, ([], None))
        return path if len(shape) == 2 and shape[1] else None

    def _column(self, path: str) -> Column:
        self.taken.add(path)
        return column(self._reader, path)
