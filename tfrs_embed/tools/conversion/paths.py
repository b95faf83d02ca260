"""Paths on the command line: local ones, and those of other file systems."""

from __future__ import annotations

import os
import re

import tensorflow as tf

from tfrs_embed.tools.command_line import InputError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_FILE = "file:"


def resolve(path: str, what: str) -> str:
    """Checks a path's scheme, and makes a local path of a `file://` one.

    Raises an InputError, which calls the path `what`.
    """
    if not path:
        raise InputError(f"The {what} is empty: it must be a path.")
    if path.lower().startswith(_FILE):
        local = path[len(_FILE) :].removeprefix("//")
        if not local.startswith("/"):
            raise InputError(
                f"'{path}' is no path that begins with file:///, nor a local "
                "one."
            )
        return local
    scheme = _scheme_of(path)
    known = {tf.compat.as_text(s) for s in tf.io.gfile.get_registered_schemes()}
    if scheme and scheme not in known:
        raise InputError(
            f"'{path}': TensorFlow has no file system '{scheme}' here, only "
            f"{sorted(known - {''})}. Copy the files, or mount it."
        )
    return path


def _scheme_of(path: str) -> str:
    """A path's scheme; "" for a local path."""
    found = _SCHEME.match(path)
    return found[1] if found else ""


def check_local(path: str) -> None:
    """Raises an InputError if a path of SOK's files has a scheme."""
    if scheme := _scheme_of(path):
        raise InputError(
            f"'{path}': SOK's files are read and written on local file systems "
            f"only, not on '{scheme}'. Copy them."
        )


def check_new_checkpoint(path: str) -> None:
    """Raises an InputError if a path is a folder's or a checkpoint's."""
    scheme = _SCHEME.match(path)
    # Without a scheme and a bucket.
    within = path[scheme.end() :].partition("/")[2] if scheme else path
    if not os.path.basename(within) or tf.io.gfile.isdir(path):
        raise InputError(
            f"'{path}' is a folder: give the checkpoint a name in it, as in "
            f"'{path.rstrip('/')}/ckpt'."
        )
    if tf.io.gfile.exists(f"{path}.index"):
        raise InputError(f"There is a checkpoint '{path}' already.")
