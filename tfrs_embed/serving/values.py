"""The values of an exported model's tables, written block after block."""

from __future__ import annotations

from collections.abc import Callable

import tensorflow as tf

from tfrs_embed._tensorflow import trackable_object_graph_pb2
from tfrs_embed.checkpoint import bundle
from tfrs_embed.serving.tables import ServedTables

_OBJECT_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"


def save_tables(
    tables: ServedTables,
    folder: str,
    writes: bool,
    progress: Callable[[int], None],
) -> None:
    """Writes the tables' values to where the graph restores them from.

    Args:
        tables: the tables.
        folder: the SavedModel's folder.
        writes: whether this worker writes; others take part in reading.
        progress: called with numbers of bytes that were written.
    """
    variables = f"{folder}/variables/variables"
    keys = _keys(variables)
    writer = bundle.BundleWriter(f"{folder}/variables/tables", progress)
    for layer, its_tables in tables.by_layer.items():
        for table in its_tables.values():
            for name, variable in table.variables.items():
                if variable.shape[0] == 0:  # There will be no block.
                    empty = tf.zeros(variable.shape, variable.dtype)
                    writer.add(keys[layer, table.name, name], empty)
            for start, block in table.blocks():
                # Without writing, others need this worker to read.
                for name, rows in block.items() if writes else ():
                    shape = table.variables[name].shape
                    key = keys[layer, table.name, name]
                    writer.add_rows(key, shape, start, rows)
    if not writes:
        return
    parts = writer.finish()
    graph = f"{folder}/variables/graph"
    for file in tf.io.gfile.glob(f"{variables}.*"):
        tf.io.gfile.rename(file, graph + file[len(variables) :])
    bundle.merge([graph, *parts], variables)


def _keys(prefix: str) -> dict[tuple[str, ...], str]:
    """The checkpoint's key of each table's variable, by its path."""
    reader = tf.train.load_checkpoint(prefix)
    graph = trackable_object_graph_pb2.TrackableObjectGraph()
    graph.ParseFromString(reader.get_tensor(_OBJECT_GRAPH))
    keys = {}

    def visit(node: int, path: tuple[str, ...]) -> None:
        for attribute in graph.nodes[node].attributes:
            keys[path] = attribute.checkpoint_key
        for child in graph.nodes[node].children:
            visit(child.node_id, (*path, child.local_name))

    for child in graph.nodes[0].children:
        if child.local_name == "tables":
            visit(child.node_id, ())
    return keys
