"""The reading of a path of any format as tables."""

from __future__ import annotations

import dataclasses
import functools
import os

import tensorflow as tf

from tfrs_embed.checkpoint import names
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.tools.command_line import InputError
from tfrs_embed.tools.conversion import (
    exported,
    keras_files,
    keras_layers,
    keras_rs,
    own,
    paths,
    sok,
    tfrs,
)
from tfrs_embed.tools.conversion.contents import Contents
from tfrs_embed.tools.conversion.objects import (
    Objects,
    RenamingReader,
    others,
    variables,
)

_INSTEAD = (
    "Give a tf.train.Checkpoint of the model, its .keras or .weights.h5 file, "
    "or what tfrs_embed.serving.export writes of it."
)


def read(path: str, dim: int | None = None) -> Contents:
    """Reads what a checkpoint holds: names, shapes, no values yet.

    Args:
        path: a checkpoint's path, a folder whose latest is meant, a folder of
            a SavedModel or of SOK's files, or a file of Keras.
        dim: the width of the rows in SOK 1's files, which don't tell it.

    Raises:
        InputError: there is no checkpoint, or it needs no dim.
        ValueError: what it holds doesn't fit together.
        tf.errors.OpError: it is damaged.
    """
    path = paths.resolve(path, "source")
    if sok.is_folder(path):
        paths.check_local(path)
        return sok.read(path, dim)
    if dim is not None:
        raise InputError(
            f"'{path}' is no folder of SOK's files: no dim needed."
        )
    if keras_files.is_file(path):
        return keras_files.read(path)
    if exported.is_saved_model(path):
        return _read(path, exported.variables_of(path))
    prefix = _prefix(path)
    return _read(prefix, prefix)


def _read(path: str, prefix: str) -> Contents:
    reader = RenamingReader(prefix)
    objects = Objects(reader)
    contents = exported.read(path, reader, objects)
    if contents is not None:
        return contents
    if objects.sharded:
        raise ValueError(
            f"'{path}' has only shards of the table '{objects.sharded[0]}', "
            f"without the numbers of their rows. {_INSTEAD}"
        )
    of_path = variables(reader)
    tables, steps, taken = own.find(reader, of_path)
    is_model = bool(objects.nodes) and "signatures" in objects.nodes[0]
    if is_model:
        tables = [
            dataclasses.replace(table, name=names.unescape(table.name))
            for table in tables
        ]
    formats = ["tfrs_embed"] if tables else []
    notes: list[str] = []
    for name, make in (
        ("TensorFlow's TPU embeddings", tfrs.TfrsFinder),
        ("keras_rs", functools.partial(keras_rs.KerasRsFinder, ours=tables)),
        ("Keras", keras_layers.KerasFinder),
    ):
        rest = {p: v for p, v in of_path.items() if p not in taken}
        finder = make(reader, rest, objects)
        if finder.tables:
            formats.append(name)
            tables += finder.tables
            steps |= finder.steps
            taken |= finder.taken
        notes += finder.notes
    nameless = [
        name
        for name in objects.full_names.values()
        if name.endswith(f"/{PARAMETERS}")
    ]
    if is_model and nameless and not tables:
        raise ValueError(
            f"'{path}' holds variables of tables, such as '{nameless[0]}', but "
            "not the layers that they belong to: Keras's model.export leaves "
            f"them out. {_INSTEAD}"
        )
    return Contents(
        path,
        " and ".join(formats) or "no tables",
        tuple(tables),
        steps,
        others(reader, taken),
        tuple(notes),
    )


def _prefix(path: str) -> str:
    prefix = path.removesuffix(".index")
    if tf.io.gfile.exists(f"{prefix}.index"):
        return prefix
    if not tf.io.gfile.isdir(path):
        raise InputError(
            f"There is no checkpoint '{path}': neither '{path}.index' nor a "
            "folder."
        )
    try:
        latest = tf.train.latest_checkpoint(path)
    except (ValueError, tf.errors.OpError) as error:
        raise ValueError(
            f"'{os.path.join(path, 'checkpoint')}' does not say which is the "
            f"latest checkpoint there: {error}"
        ) from error
    if latest is None:
        found = sorted(tf.io.gfile.glob(os.path.join(path, "*.index")))
        if len(found) != 1:
            raise InputError(
                f"The folder '{path}' doesn't say which checkpoint is its "
                f"latest, and has {len(found) or 'none'} of TensorFlow's, nor "
                "SOK's files."
            )
        latest = found[0].removesuffix(".index")
    return latest
