"""Paths of the command line: local ones, and those of other file systems."""

from __future__ import annotations

import os
import re

import tensorflow as tf

from tfrs_embed.tools.command_line import InputError

_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_FILE = "file:"


def resolve(path: str, what: str) -> str:
    """Makes a local path of one of `file://`, and checks others' schemes.

    Args:
        path: a path as it was given.
        what: what it is, for errors.

    Returns:
        A path that TensorFlow reads and writes; local ones have no scheme.

    Raises:
        InputError: it is empty, or TensorFlow has no such file system.
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
    scheme = scheme_of(path)
    known = {_as_text(s) for s in tf.io.gfile.get_registered_schemes()}
    if scheme and scheme not in known:
        raise InputError(
            f"'{path}': TensorFlow has no file system '{scheme}' here, only "
            f"{sorted(known - {''})}. Copy the files, or mount it."
        )
    return path


def scheme_of(path: str) -> str:
    """A path's scheme; "" for that of a local path."""
    found = _SCHEME.match(path)
    return found[1] if found else ""


def check_local(path: str) -> None:
    """Checks that a path that SOK's files have, or will have, is local.

    Raises:
        InputError: it is not.
    """
    if scheme := scheme_of(path):
        raise InputError(
            f"'{path}': SOK's files are read and written on local file systems "
            f"only, not on '{scheme}'. Copy them."
        )


def check_new_checkpoint(path: str) -> None:
    """Checks that a checkpoint can be written to a path.

    Args:
        path: the path, as `resolve` returns it.

    Raises:
        InputError: it is that of a folder, or of a checkpoint.
        tf.errors.OpError: it can't be looked at.
    """
    within = path[_end_of_root(path) :]
    if not os.path.basename(within) or tf.io.gfile.isdir(path):
        raise InputError(
            f"'{path}' is a folder: give the checkpoint a name in it, as in "
            f"'{path.rstrip('/')}/ckpt'."
        )
    if tf.io.gfile.exists(f"{path}.index"):
        raise InputError(f"There is a checkpoint '{path}' already.")


def _end_of_root(path: str) -> int:
    """Where the path begins behind a scheme and, say, a bucket."""
    scheme = _SCHEME.match(path)
    if scheme is None:
        return 0
    slash = path.find("/", scheme.end())
    return len(path) if slash < 0 else slash


def _as_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
