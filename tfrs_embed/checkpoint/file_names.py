"""Names of files: those made of tables' names, and those that files tell.

A file may come from somebody else. Whatever it names is in its own folder.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.names import escape
from tfrs_embed.checkpoint.stored import damaged

# Of most file systems, in bytes.
_LONGEST = 255


def in_folder(name: str, taken: Collection[str] = ()) -> str:
    """Returns the name of an object's file or folder.

    No two names give the same one; on file systems that ignore case, names that
    differ in case alone are one file. A dot at the beginning stays.

    Args:
        name: the object's name: a table's, a layer's or a slot's.
        taken: names that the folder has for other files.

    Raises:
        ValueError: the name is empty, or too long for a file's.
    """
    found = escape(name, "/\\\0")
    if found in (".", "..", *taken):
        found = f"%{ord(found[0]):02X}{found[1:]}"
    size = len(os.fsencode(found))
    if not 0 < size <= _LONGEST:
        raise ValueError(
            f"The name '{found}' can't be a file's: it has {size} bytes, and a "
            f"file's name has 1 to {_LONGEST}."
        )
    return found


def is_plain(name: str) -> bool:
    """Whether a name that a file tells is one in the file's own folder."""
    return name not in ("", ".", "..") and not {*"/\\\0"} & {*name}


def state_of(folder: str) -> Any:
    """Reads the file `checkpoint`, in which TensorFlow lists a folder's files.

    Returns:
        A `CheckpointState`, whose paths are in the folder or below it; None:
        there is no such file, or no text in TensorFlow's format in it.

    Raises:
        tf.errors.DataLossError: the file names no checkpoint, or one elsewhere.
    """
    where = f"'{os.path.join(folder, 'checkpoint')}'"
    try:
        state = tf.train.get_checkpoint_state(folder)
        if state is None:
            return None
        here = os.path.realpath(folder)
        for path in [
            state.model_checkpoint_path,
            *state.all_model_checkpoint_paths,
        ]:
            # What a link in the folder leads to is elsewhere, too.
            parent = os.path.realpath(os.path.dirname(path))
            if os.path.commonpath([here, parent]) != here:
                raise damaged(
                    f"{where} names the checkpoint '{path}', which is in "
                    "another folder. If this folder was copied or moved, give "
                    "a checkpoint's path, or correct the file"
                )
    except ValueError as error:  # Also of a path that is none.
        raise damaged(
            f"{where} does not say which is the latest checkpoint there: "
            f"{error}"
        ) from error
    return state


def latest(folder: str) -> str | None:
    """Returns the path of a folder's latest checkpoint, or None.

    Raises:
        tf.errors.DataLossError: see `state_of`.
    """
    return tf.train.latest_checkpoint(folder) if state_of(folder) else None
