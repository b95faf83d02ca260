"""The objects that a TensorFlow checkpoint is of."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping

import numpy as np
import tensorflow as tf
from google.protobuf.message import (  # type: ignore[import-untyped]
    DecodeError,
    Message,
)

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.stored import Piece
from tfrs_embed.compat.private_tensorflow import trackable_object_graph_pb2
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.conversion import places
from tfrs_embed.tools.conversion.contents import Column, Other
from tfrs_embed.tools.conversion.places import Nodes

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"

#: Variables' shapes and dtypes by path.
Variables = Mapping[str, tuple[list[int], tf.DType]]


def unescape(part: str) -> str:
    """The object's name that a part of a key stands for."""
    return re.sub(r"\.([.S])", lambda m: "/" if m[1] == "S" else ".", part)


class RenamingReader(BundleReader):
    """Reads tensors by other names than the files have for them."""

    def __init__(self, prefix: str) -> None:
        super().__init__(prefix)
        # Names in the files, by those that `rename` gave.
        self._names: Mapping[str, str] = {}

    def rename(self, names: Mapping[str, str]) -> None:
        """Gives tensors other names.

        Args:
            names: the names in the files by the new ones.
        """
        new = {old: name for name, old in names.items()}
        self._names = names
        self.shapes, self.dtypes = (
            {new.get(name, name): each for name, each in of_all.items()}
            for of_all in (self.shapes, self.dtypes)
        )

    def pieces(self, name: str) -> list[Piece]:
        return super().pieces(self._names.get(name, name))

    def _read(self, name: str, slice_: str) -> tf.Tensor:
        return super()._read(self._names.get(name, name), slice_)


class Objects:
    """The objects' names and variables.

    Tables' variables get the names in the reader that their layers have for
    them. In a SavedModel, and in TensorFlow's mid-level API, a key may be
    another.

    Args:
        reader: the checkpoint.

    Attributes:
        paths: the objects' paths, by number.
    """

    def __init__(self, reader: RenamingReader) -> None:
        graph = trackable_object_graph_pb2.TrackableObjectGraph()
        if GRAPH in reader.shapes:
            parse(graph, reader, GRAPH)
        #: The objects' children, as numbers of objects by name.
        self.nodes: Nodes = [
            {
                child.local_name: child.node_id
                for child in node.children
                if child.node_id < len(graph.nodes)
            }
            for node in graph.nodes
        ]
        self.paths = places.paths(self.nodes)
        keys = {
            number: attribute.checkpoint_key
            for number, node in enumerate(graph.nodes)
            for attribute in node.attributes
            if attribute.checkpoint_key.endswith(VALUE)
        }
        #: The names in the files of those that have others in the reader.
        self.renamed: dict[str, str] = {}
        for number, path in places.of_tables(self.nodes, self.paths):
            key, name = keys.get(number, ""), path + VALUE
            if key in reader.shapes and name not in reader.shapes:
                self.renamed.setdefault(name, key)
        reader.rename(self.renamed)
        renamed = {key: name for name, key in self.renamed.items()}
        #: By key, what a variable was called in Python.
        self.full_names: Mapping[str, str] = {
            renamed.get(
                attribute.checkpoint_key, attribute.checkpoint_key
            ): attribute.full_name
            for node in graph.nodes
            for attribute in node.attributes
        }
        #: The paths of those objects that are variables, by number.
        self.variables: Mapping[int, str] = {
            number: renamed.get(key, key).removesuffix(VALUE)
            for number, key in keys.items()
        }
        #: The paths of tables of which there are only shards.
        self.sharded = [
            self.paths[number]
            for number in self.paths
            if PARAMETERS in self.nodes[number]
            and "shard_0" in self.nodes[self.nodes[number][PARAMETERS]]
            and self.nodes[number][PARAMETERS] not in keys
        ]

    def names_of(self, path: str) -> list[str]:
        """Under which names the owner of an object has it.

        Args:
            path: the object's path.

        Returns:
            The names, sorted; one, unless objects are shared.
        """
        *owners, name = [unescape(part) for part in path.split("/")]
        children = self.nodes[0] if self.nodes else {}
        for owner in owners:
            if owner not in children:
                return [name]
            children = self.nodes[children[owner]]
        return sorted(
            other
            for other, child in children.items()
            if child == children.get(name)
        ) or [name]


def parse(message: Message, reader: BundleReader, key: str) -> None:
    """Fills a protocol buffer from a checkpoint's tensor.

    Raises:
        ValueError: the tensor is none.
    """
    where = f"'{key}' in '{reader.prefix}'"
    if reader.dtypes[key] != tf.string or reader.shapes[key]:
        raise ValueError(f"{where} is no string.")
    try:
        message.ParseFromString(reader.read(key).numpy())
    except DecodeError as error:
        raise ValueError(f"{where} can't be read: {error}") from error


def variables(reader: BundleReader) -> Variables:
    """The shapes and dtypes of a checkpoint's variables, by their paths."""
    return {
        key[: -len(VALUE)]: (shape, reader.dtypes[key])
        for key, shape in sorted(reader.shapes.items())
        if key.endswith(VALUE)
    }


def column(reader: BundleReader, path: str) -> Column:
    """A variable, [rows, dim] or [rows], as a column of a table.

    Args:
        reader: the checkpoint.
        path: the variable's path.
    """
    shape = tuple(reader.shapes[path + VALUE])

    def read(start: int, size: int) -> np.ndarray:
        values = reader.read_rows(path + VALUE, start, size).numpy()
        return np.asarray(values, np.float32)

    return Column(shape, read)


def numbers(reader: BundleReader, path: str) -> Column:
    """A variable, [n] or [n, m] int64, as keys or counters of a table.

    Args:
        reader: the checkpoint.
        path: the variable's path.
    """

    def read(start: int, size: int) -> np.ndarray:
        if not size:
            return np.zeros((0, *shape[1:]), np.int64)
        return reader.read_rows(path + VALUE, start, size).numpy()

    shape = tuple(reader.shapes[path + VALUE])
    return Column(shape, read, tf.int64)


def others(reader: BundleReader, taken: Container[str]) -> tuple[Other, ...]:
    """What a checkpoint holds beside its tables, by name.

    Args:
        reader: the checkpoint.
        taken: the paths of the tables' variables.
    """
    return tuple(
        Other(
            name=name,
            shape=tuple(reader.shapes[key]),
            dtype=reader.dtypes[key].name,
            nbytes=reader.dtypes[key].size * math.prod(reader.shapes[key]),
        )
        for key in sorted(reader.shapes)
        if key != GRAPH and (name := key.removesuffix(VALUE)) not in taken
    )
