"""Gives inputs of an exported model names that TensorFlow refuses."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import saved_model_pb2


def rename_inputs(
    folder: str, signatures: Mapping[str, Mapping[str, str]]
) -> None:
    """Renames inputs of a SavedModel's signatures, in its file.

    Servers use the names of signatures, and `tf.saved_model.load` the keywords
    of their functions. The names in the graph stay. `signatures` has the new
    names by the old ones, by signature.
    """
    file = f"{folder}/saved_model.pb"
    saved = saved_model_pb2.SavedModel()
    with tf.io.gfile.GFile(file, "rb") as stream:
        saved.ParseFromString(stream.read())
    for meta_graph in saved.meta_graphs:
        nodes = meta_graph.object_graph_def.nodes
        children = {c.local_name: c.node_id for c in nodes[0].children}
        functions = {
            child.local_name: nodes[child.node_id]
            for child in nodes[children["signatures"]].children
        }
        for signature, names in signatures.items():
            inputs = meta_graph.signature_def[signature].inputs
            kept = {name: inputs.pop(name) for name in list(inputs)}
            for name, tensor in kept.items():
                inputs[names.get(name, name)].CopyFrom(tensor)
            function = functions[signature].bare_concrete_function
            keywords = function.argument_keywords
            keywords[:] = [names.get(name, name) for name in keywords]
    with tf.io.gfile.GFile(file, "wb") as stream:
        stream.write(saved.SerializeToString(deterministic=True))
