"""Reads the tables at a path, whatever format it has."""

from __future__ import annotations

import os

import tensorflow as tf

from tfrs_embed.checkpoint import chain, listing
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.command_line import InputError
from tfrs_embed.tools.conversion import (
    exported,
    keras_files,
    keras_layers,
    keras_rs,
    paths,
    sok,
    tfrs,
    tfrs_embed_layers,
)
from tfrs_embed.tools.conversion.contents import Contents
from tfrs_embed.tools.conversion.objects import GRAPH, SavedObjects

#: The libraries with tables in TensorFlow's checkpoints. Each finds tables
#: among the variables that those before it left.
_LIBRARIES = {
    "tfrs_embed": tfrs_embed_layers.find_tables,
    "TensorFlow's TPU embeddings": tfrs.find_tables,
    "keras_rs": keras_rs.find_tables,
    "Keras": keras_layers.find_tables,
}


def read(path: str) -> Contents:
    """Finds the tables at a path, without reading values.

    Args:
        path: a checkpoint's path; a folder, for its latest checkpoint; the
            folder of a SavedModel or of SOK's files; or a file of Keras.

    Raises:
        ValueError: the contents don't fit together.
        InputError: there is no checkpoint.
        tf.errors.OpError: the checkpoint is damaged.
    """
    path = paths.resolve(path, "source")
    try:
        return _read_any(path)
    except (ArithmeticError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(
            f"The objects in '{path}' don't fit together: "
            f"{type(error).__name__}: {error}."
        ) from error


def _read_any(path: str) -> Contents:
    if sok.is_folder(path):
        paths.check_local(path)
        return sok.read(path)
    if keras_files.is_file(path):
        return keras_files.read(path)
    if exported.is_saved_model(path):
        return _read(path, os.path.join(path, "variables", "variables"))
    prefix = prefix_of(path)
    return _read(prefix, prefix)


def _read(path: str, prefix: str) -> Contents:
    """Finds the tables of a checkpoint, which a SavedModel may have."""
    saved, found = SavedObjects(prefix), Contents(path)
    exported.find_tables(saved, found)
    if found.tables:
        found.format = exported.FORMAT
        found.others = saved.others(found.taken)
        return found
    formats = []
    for name, find in _LIBRARIES.items():
        before = len(found.tables)
        find(saved, found)
        if len(found.tables) > before:
            formats.append(name)
    nameless = [
        name
        for name in saved.full_names.values()
        if name.endswith(f"/{PARAMETERS}")
    ]
    if saved.is_saved_model and nameless and not found.tables:
        raise ValueError(
            f"'{path}' holds variables of tables, such as '{nameless[0]}', but "
            "not the layers that they belong to: Keras's model.export leaves "
            "them out. Give a tf.train.Checkpoint of the model, or what "
            "tfrs_embed.serving.export writes of it."
        )
    if chain.HEADER in saved.reader.shapes and GRAPH not in saved.reader.shapes:
        found.notes.append(
            "It holds the rows of tables at different moments: a thread has "
            "written it, and the next delta of its chain makes it right."
        )
    if formats:
        found.format = " and ".join(formats)
    found.tables.sort(key=lambda table: table.path)
    found.others = saved.others(found.taken)
    return found


def prefix_of(path: str) -> str:
    """Returns the path of a checkpoint, or of a folder's latest one.

    Raises an InputError if there is none, and a tf.errors.DataLossError if the
    folder's `checkpoint` is damaged or names one in another folder.
    """
    prefix = path.removesuffix(".index")
    if tf.io.gfile.exists(f"{prefix}.index"):
        return prefix
    if not tf.io.gfile.isdir(path):
        raise InputError(
            f"There is no checkpoint '{path}': neither '{path}.index' nor a "
            "folder."
        )
    latest = listing.latest(path)
    if latest is None:
        raise InputError(
            f"The folder '{path}' doesn't say which checkpoint is its latest, "
            "and has no files of SOK: give a checkpoint's path."
        )
    return latest
