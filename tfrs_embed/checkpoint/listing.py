"""The file `checkpoint`, in which TensorFlow lists a folder's checkpoints.

It may come from somebody else: whatever it lists is in its own folder.
"""

from __future__ import annotations

import os
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.stored import damaged


def state_of(folder: str) -> Any:
    """Reads the file `checkpoint`, in which TensorFlow lists a folder's files.

    Returns:
        A `CheckpointState`, whose paths are in the folder or below it; None:
        there is no such file, or no text in TensorFlow's format in it.

    Raises:
        tf.errors.DataLossError: the file names no checkpoint, or one elsewhere.
    """
    path = os.path.join(folder, "checkpoint")
    where = f"'{path}'"
    if os.path.exists(path) and not os.path.isfile(path):
        raise damaged(f"{where} is no file")  # A pipe is waited for.
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
