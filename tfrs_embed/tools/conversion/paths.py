"""Paths on the command line: local ones, and those of other file systems."""

from __future__ import annotations

import os

import tensorflow as tf

from tfrs_embed.tools.command_line import InputError

_FILE = "file://"


def resolve(path: str, what: str) -> str:
    """Checks a path, and makes a local path of a `file://` one.

    Raises an InputError, which calls the path `what`.
    """
    if not path:
        raise InputError(f"The {what} is empty: it must be a path.")
    path = path.removeprefix(_FILE)
    scheme, there, _ = path.partition("://")
    known = map(tf.compat.as_text, tf.io.gfile.get_registered_schemes())
    if there and scheme not in known:
        raise InputError(
            f"'{path}': TensorFlow has no file system '{scheme}' here. Copy "
            "the files, or mount it."
        )
    return path


def check_local(path: str) -> None:
    """Raises an InputError if a path of SOK's files has a scheme."""
    if "://" in path:
        raise InputError(
            f"'{path}': SOK's files are read on local file systems only. "
            "Copy them."
        )


def check_new_checkpoint(path: str) -> None:
    """Raises an InputError if a path is a folder's or a checkpoint's."""
    _, there, within = path.partition("://")
    # Without a scheme and a bucket.
    name = within.partition("/")[2] if there else path
    if not os.path.basename(name) or tf.io.gfile.isdir(path):
        raise InputError(
            f"'{path}' is a folder: give the checkpoint a name in it, as in "
            f"'{path.rstrip('/')}/ckpt'."
        )
    if tf.io.gfile.exists(f"{path}.index"):
        raise InputError(f"There is a checkpoint '{path}' already.")
