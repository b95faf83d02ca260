"""The objects and the variables of a TensorFlow checkpoint."""

from __future__ import annotations

import collections
import math
from collections.abc import Container, Mapping, Sequence

import numpy as np
import tensorflow as tf
from google.protobuf.message import (  # type: ignore[import-untyped]
    DecodeError,
    Message,
)

from tfrs_embed.checkpoint import chain
from tfrs_embed.checkpoint.names import SUFFIX, in_key, key_of
from tfrs_embed.checkpoint.stored_pieces import most_bytes
from tfrs_embed.compat.private_tensorflow import trackable_object_graph_pb2
from tfrs_embed.tools.conversion.contents import Column, PlainVariable

#: The tensor with the graph of objects, serialized.
GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_LONGEST_NAME = 4096


class SavedObjects:
    """The objects of the TensorFlow checkpoint `prefix`, and its variables.

    A delta is read as the full checkpoint that it stands for. Objects are known
    by their numbers in the checkpoint's graph of objects.

    Attributes:
        reader: reads the tensors.
        nodes: each object's children: numbers of objects by name.
        paths: the objects' paths, as TensorFlow makes keys of paths. The
            nearest to the root come first.
        columns: the variables.
        full_names: the variables' names in Python.
        slots: the slots of tf_keras's legacy optimizers: the optimizer, the
            variable, the slot's name, the slot.
        is_saved_model: whether the objects are a SavedModel's.
    """

    def __init__(self, prefix: str) -> None:
        self.reader = chain.read(prefix)
        graph = trackable_object_graph_pb2.TrackableObjectGraph()
        if GRAPH in self.reader.shapes:
            self.parse(graph, GRAPH)
        self.nodes: Sequence[Mapping[str, int]] = [
            {
                child.local_name: child.node_id
                for child in node.children
                if 0 <= child.node_id < len(graph.nodes)
            }
            for node in graph.nodes
        ]
        self.is_saved_model = any("signatures" in n for n in self.nodes[:1])
        self.paths = self._find_paths(graph.ByteSize())
        self.columns: dict[int, Column] = {}
        self.full_names: dict[int, str] = {}
        for number, node in enumerate(graph.nodes):
            # This package's savers write no attributes.
            keys = {key_of(node.registered_saver.object_name): ""}
            keys |= {a.checkpoint_key: a.full_name for a in node.attributes}
            for key, full_name in keys.items():
                if len(full_name) > _LONGEST_NAME:
                    raise ValueError(
                        f"'{key}' in '{prefix}' has a name in Python of "
                        f"{len(full_name)} letters."
                    )
                if key in self.reader.shapes and key.endswith(SUFFIX):
                    self.columns[number] = self._column(key)
                    self.full_names[number] = full_name
        self.slots = [
            (
                optimizer,
                slot.original_variable_node_id,
                slot.slot_name,
                slot.slot_variable_node_id,
            )
            for optimizer, node in enumerate(graph.nodes)
            for slot in node.slot_variables
        ]

    def _find_paths(self, size: int) -> dict[int, str]:
        """Finds the paths of a graph of `size` bytes."""
        left = most_bytes(size)
        found = {0: ""} if self.nodes else {}
        waiting = collections.deque(found)
        while waiting:
            owner = waiting.popleft()
            for name, number in self.nodes[owner].items():
                if number not in found:
                    path = f"{found[owner]}/{in_key(name)}"
                    found[number] = path.removeprefix("/")
                    left -= len(path)
                    if left < 0:
                        raise ValueError(
                            f"The objects in '{self.reader.prefix}' are so "
                            f"deep that their paths need more than "
                            f"{most_bytes(size)} bytes."
                        )
                    waiting.append(number)
        return found

    def _column(self, key: str) -> Column:
        shape, dtype = tuple(self.reader.shapes[key]), self.reader.dtypes[key]

        def read(start: int, size: int) -> np.ndarray:
            if not shape:
                return np.asarray(self.reader.read(key))
            if not size:
                return np.zeros((0, *shape[1:]), dtype.as_numpy_dtype)
            rows = self.reader.read_rows(key, start, size).numpy()
            return np.asarray(rows, np.float32) if dtype.is_floating else rows

        return Column(shape, read, dtype, key.removesuffix(SUFFIX))

    def variables(self, owner: int) -> dict[str, Column]:
        """The variables among an object's children."""
        return {
            name: self.columns[number]
            for name, number in self.nodes[owner].items()
            if number in self.columns
        }

    def has_step(self, owner: int) -> bool:
        """Whether an object counts steps, as layers of this package do."""
        return "step" in self.variables(owner)

    def others(self, taken: Container[str]) -> list[PlainVariable]:
        """The tensors whose names, without TensorFlow's end, are not taken."""
        shapes, dtypes = self.reader.shapes, self.reader.dtypes
        return [
            PlainVariable(
                key.removesuffix(SUFFIX),
                tuple(shapes[key]),
                dtypes[key].name,
                dtypes[key].size * math.prod(shapes[key]),
            )
            for key in sorted(shapes)
            if key not in (GRAPH, chain.HEADER)
            and key.removesuffix(SUFFIX) not in taken
        ]

    def parse(self, message: Message, key: str) -> None:
        """Fills a protocol buffer from a tensor, or raises a ValueError."""
        where = f"'{key}' in '{self.reader.prefix}'"
        if self.reader.dtypes[key] != tf.string or self.reader.shapes[key]:
            raise ValueError(f"{where} is no string.")
        try:
            message.ParseFromString(self.reader.read(key).numpy())
        except DecodeError as error:
            raise ValueError(f"{where} can't be read: {error}") from error
