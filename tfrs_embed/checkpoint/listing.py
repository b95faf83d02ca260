"""The checkpoints of a folder: all, and the files of a `DeltaManager`.

TensorFlow lists a folder's checkpoints in the file `checkpoint`. It may come
from somebody else: whatever it lists is in its own folder.
"""

from __future__ import annotations

import fcntl
import os
import re
import weakref
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader
from tfrs_embed.checkpoint.chain import Link, link_of
from tfrs_embed.checkpoint.stored_pieces import damaged
from tfrs_embed.compat.files import open_own, remove_folder
from tfrs_embed.compat.private_tensorflow import checkpoint_management

_LOCK = ".delta_manager.lock"
#: The end of the names of files that threads write.
BASE = "-base"
# The place of a checkpoint that is in no chain.
_NO_LINK = Link(0, 0, 0, 0)


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


def checkpoints(folder: str) -> list[str]:
    """Returns the paths of a folder's checkpoints, the oldest first.

    Raises:
        tf.errors.DataLossError: see `state_of`.
    """
    state = state_of(folder)
    paths = [] if state is None else state.all_model_checkpoint_paths
    return [path for path in paths if tf.io.gfile.exists(f"{path}.index")]


class ChainFolder:
    """The files of a folder to which one `DeltaManager` saves chains.

    Args:
        folder: the folder's path.
        name: the beginning of the files' names.
    """

    def __init__(self, folder: str, name: str) -> None:
        self.folder, self._name = folder, name
        self._files: list[tuple[str, Link]] | None = None
        self._is_locked = False

    def files(self) -> list[tuple[str, Link]]:
        """Returns the complete files and their places, the oldest first.

        Raises:
            tf.errors.OpError: the folder's list or a file is damaged, or the
                list names files of other folders.
        """
        if self._files is None:
            self._files = [
                (path, link_of(BundleReader(path)) or _NO_LINK)
                for path in checkpoints(self.folder)
            ]
        return self._files

    def new_path(self) -> str:
        """Returns the next file's path."""
        ends = (path.rpartition("-")[2] for path, _ in self.files())
        last = max((int(e) for e in ends if e.isdecimal()), default=0)
        return os.path.join(self.folder, f"{self._name}-{last + 1}")

    def add(
        self, path: str, link: Link, max_to_keep: int, is_chief: bool
    ) -> list[tuple[str, Link]]:
        """Lists a new file; returns those of old chains, which are no more."""
        files = [*self.files(), (path, link)]
        starts = [
            i
            for i, (_, each) in enumerate(files)
            if each.number == 0 or each.previous.endswith(BASE)
        ]
        first = starts[-max_to_keep] if starts[max_to_keep:] else 0
        if is_chief:
            checkpoint_management.update_checkpoint_state_internal(
                self.folder,
                path,
                [each for each, _ in files[first:]],
                save_relative_paths=True,
            )
        self._files = files[first:]
        return files[:first]

    def remove(self, gone: list[tuple[str, Link]]) -> None:
        """Removes files of old chains, but none with a name of the user's."""
        ours = re.compile(re.escape(self._name) + r"-\d+")
        for path, link in gone:
            if ours.fullmatch(os.path.basename(path)):
                remove(path)
            if link.previous.endswith(BASE):
                remove(os.path.join(self.folder, link.previous))

    def lock(self) -> None:
        """Keeps other trainers of this machine from saving to the folder.

        Removes what a trainer's thread has left that was killed.

        Raises:
            RuntimeError: another trainer saves to the folder.
        """
        if self._is_locked or "://" in self.folder:
            return
        os.makedirs(self.folder, exist_ok=True)
        path = os.path.join(self.folder, _LOCK)
        file = open_own(path, os.O_CREAT | os.O_RDWR)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(file)
            raise RuntimeError(
                f"Another DeltaManager saves to '{self.folder}': each "
                "trainer needs a folder of its own. To read what a trainer "
                "saves, use tf.train.latest_checkpoint and "
                "tf.train.Checkpoint.restore."
            ) from None
        self._is_locked = True
        weakref.finalize(self, os.close, file)
        used = {link.previous for _, link in self.files()}
        pattern = os.path.join(self.folder, f"{self._name}-*{BASE}*")
        for left in tf.io.gfile.glob(pattern):
            name = os.path.basename(left)
            if name[: name.index(BASE)] + BASE in used:
                continue
            if tf.io.gfile.isdir(left):
                remove_folder(left)
            else:
                tf.io.gfile.remove(left)


def remove(path: str) -> None:
    """Removes a checkpoint's files: its index first, then its data."""
    # With what a killed save has left of each.
    for end in ("index", "data-?????-of-?????"):
        for file in tf.io.gfile.glob(f"{path}.{end}*"):
            tf.io.gfile.remove(file)
    # TensorFlow's parts, and those of this library.
    for folder in (f"{path}_temp", *tf.io.gfile.glob(f"{path}-*.*_temp")):
        remove_folder(folder)
