"""The objects that a TensorFlow checkpoint is of."""

from __future__ import annotations

import math
import re
from collections.abc import Container, Mapping, Sequence

import numpy as np
import tensorflow as tf
from google.protobuf.message import (  # type: ignore[import-untyped]
    DecodeError,
    Message,
)

from tfrs_embed._tensorflow import trackable_object_graph_pb2
from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.conversion.contents import Column, Other

GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
VALUE = "/.ATTRIBUTES/VARIABLE_VALUE"

#: Variables' shapes and dtypes by path.
Variables = Mapping[str, tuple[list[int], tf.DType]]


def escape(name: str) -> str:
    """An object's name as a part of a key."""
    return name.replace(".", "..").replace("/", ".S")


def unescape(part: str) -> str:
    """The object's name that a part of a key stands for."""
    return re.sub(r"\.([.S])", lambda m: "/" if m[1] == "S" else ".", part)


class Objects:
    """The objects' names and variables.

    Args:
        reader: the checkpoint.
    """

    def __init__(self, reader: BundleReader) -> None:
        graph = trackable_object_graph_pb2.TrackableObjectGraph()
        if GRAPH in reader.shapes:
            parse(graph, reader, GRAPH)
        #: By key, what a variable was called in Python.
        self.full_names: Mapping[str, str] = {
            attribute.checkpoint_key: attribute.full_name
            for node in graph.nodes
            for attribute in node.attributes
        }
        #: The objects' children, as numbers of objects by name.
        self.nodes: Sequence[Mapping[str, int]] = [
            {child.local_name: child.node_id for child in node.children}
            for node in graph.nodes
        ]
        #: The paths of those objects that are variables, by number.
        self.variables: Mapping[int, str] = {
            number: attribute.checkpoint_key.removesuffix(VALUE)
            for number, node in enumerate(graph.nodes)
            for attribute in node.attributes
        }

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
