"""The objects and the variables of a TensorFlow checkpoint."""

from __future__ import annotations

import math
from collections.abc import Container

import numpy as np
import tensorflow as tf
from google.protobuf.message import (  # type: ignore[import-untyped]
    DecodeError,
    Message,
)

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.names import SUFFIX, from_key
from tfrs_embed.compat.private_tensorflow import trackable_object_graph_pb2
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion import places
from tfrs_embed.tools.conversion.contents import Column, Other
from tfrs_embed.tools.conversion.places import Nodes

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


class SavedObjects:
    """The objects of the TensorFlow checkpoint `prefix`, and its variables.

    A variable's path is the beginning of its key. A table's variable has the
    path that it has in a checkpoint of its layer, even where the key is another
    one: in SavedModels, and in TensorFlow's mid-level API.

    Attributes:
        reader: reads the tensors.
        nodes: each object's children: numbers of objects by name.
        paths: the objects' paths by number.
        columns: the variables by path, sorted.
        keys: the variables' keys by path.
        variables: the paths of the objects that are variables, by number.
        full_names: the variables' names in Python, by path.
        sharded: the paths of tables that were saved in shards alone.
        is_saved_model: whether the objects are a SavedModel's.
    """

    def __init__(self, prefix: str) -> None:
        self.reader = BundleReader(prefix)
        graph = trackable_object_graph_pb2.TrackableObjectGraph()
        if _GRAPH in self.reader.shapes:
            self.parse(graph, _GRAPH)
        self.nodes: Nodes = [
            {
                child.local_name: child.node_id
                for child in node.children
                if child.node_id < len(graph.nodes)
            }
            for node in graph.nodes
        ]
        self.is_saved_model = any("signatures" in n for n in self.nodes[:1])
        self.paths = places.paths(self.nodes)
        keys = {
            number: attribute.checkpoint_key
            for number, node in enumerate(graph.nodes)
            for attribute in node.attributes
            if attribute.checkpoint_key.endswith(SUFFIX)
        }
        shapes = self.reader.shapes
        key_of: dict[str, str] = {}
        for number, path in places.of_tables(self.nodes, self.paths).items():
            key, name = keys.get(number, ""), path + SUFFIX
            if key in shapes and name not in shapes:
                key_of.setdefault(name, key)
        # The names of other tensors are their keys.
        key_of |= {key: key for key in shapes.keys() - key_of.values()}
        self._keys = dict(sorted(key_of.items()))
        self.keys = {
            name[: -len(SUFFIX)]: key
            for name, key in self._keys.items()
            if name.endswith(SUFFIX)
        }
        path_of = {key: path for path, key in self.keys.items()}
        self.columns = {
            path: self._column(key) for path, key in self.keys.items()
        }
        self.variables = {
            number: path_of.get(key, key[: -len(SUFFIX)])
            for number, key in keys.items()
        }
        self.full_names = {
            path_of.get(a.checkpoint_key, a.checkpoint_key): a.full_name
            for node in graph.nodes
            for a in node.attributes
        }
        self.sharded = [
            self.paths[number]
            for number in self.paths
            if PARAMETERS in self.nodes[number]
            and "shard_0" in self.nodes[self.nodes[number][PARAMETERS]]
            and self.nodes[number][PARAMETERS] not in keys
        ]

    def _column(self, key: str) -> Column:
        shape, dtype = tuple(self.reader.shapes[key]), self.reader.dtypes[key]

        def read(start: int, size: int) -> np.ndarray:
            if not shape:
                return np.asarray(self.reader.read(key))
            if not size:
                return np.zeros((0, *shape[1:]), dtype.as_numpy_dtype)
            rows = self.reader.read_rows(key, start, size).numpy()
            return np.asarray(rows, np.float32) if dtype.is_floating else rows

        return Column(shape, read, dtype)

    def names_of(self, path: str) -> list[str]:
        """The names under which an object's owner has it, sorted."""
        owner, _, last = path.rpartition("/")
        numbers = [n for n, each in self.paths.items() if each == owner]
        children = self.nodes[numbers[0]] if numbers else {}
        number = children.get(from_key(last), -1)
        return sorted(n for n, child in children.items() if child == number)

    def others(self, taken: Container[str]) -> list[Other]:
        """The tensors that are not in `taken`, a set of variables' paths."""
        shapes, dtypes = self.reader.shapes, self.reader.dtypes
        return [
            Other(
                name.removesuffix(SUFFIX),
                tuple(shapes[key]),
                dtypes[key].name,
                dtypes[key].size * math.prod(shapes[key]),
            )
            for name, key in self._keys.items()
            if key != _GRAPH and name.removesuffix(SUFFIX) not in taken
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
