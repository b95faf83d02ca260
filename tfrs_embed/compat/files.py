"""Files and folders at names that others can know, without following links.

Where others can write to a folder, somebody may have put a symbolic link there,
to a file of this process's user, at a name that is about to be written or
removed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Iterator

import tensorflow as tf


def plain_path(path: str | os.PathLike[str], name: str) -> str:
    """Returns the path of a checkpoint or model as text.

    Raises:
        ValueError: TensorFlow would read it as a pattern.
    """
    path = os.fspath(path)
    if any(character in path for character in "[*?\\"):
        raise ValueError(
            f"{name}: '{path}' has one of the characters [ * ? \\, and "
            "TensorFlow, which reads a checkpoint's path as a pattern of "
            "paths, would not find the files. Choose another name."
        )
    return path


def open_own(path: str, flags: int) -> int:
    """Opens a file as `os.open` does; an OSError if it is a link."""
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, f"'{path}' is a symbolic link") from None


def open_new(path: str) -> int:
    """Opens a new file to write, in place of a file or link that is there."""
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
    return open_own(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)


def make_folders(folder: str, *names: str) -> str:
    """Makes a folder, and folders in it, one in the other; returns the last.

    The user names `folder`, which may be a link. Below it whoever owns a folder
    could replace its files: that may be this user, root, or the owner of
    `folder`.

    Raises:
        OSError: a folder below is a link, a file, or of another user; or it
            can't be made.
    """
    os.makedirs(folder, exist_ok=True)
    owners = {0, os.geteuid(), os.stat(folder).st_uid}
    for name in names:
        folder = os.path.join(folder, name)
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder)
        found = os.lstat(folder)
        if not stat.S_ISDIR(found.st_mode):
            why = f"'{folder}' is a symbolic link or a file"
            raise NotADirectoryError(errno.ENOTDIR, why)
        if found.st_uid not in owners:
            why = f"'{folder}' belongs to another user, {found.st_uid}"
            raise PermissionError(errno.EACCES, why)
    return folder


@contextlib.contextmanager
def temporary_folder(path: str) -> Iterator[str]:
    """Makes a folder in place of one, or a link, that is there; removes it.

    Raises:
        tf.errors.OpError: it can't be made.
    """
    remove_folder(path)  # Left by a process that was killed.
    if "://" in path:
        tf.io.gfile.makedirs(path)
    else:
        tf.io.gfile.makedirs(os.path.dirname(path) or ".")
        # Unlike `makedirs`, an error if somebody has just made it.
        tf.io.gfile.mkdir(path)
    try:
        yield path
    finally:
        with contextlib.suppress(tf.errors.OpError):
            remove_folder(path)


def remove_folder(path: str) -> None:
    """Removes a folder, if it exists, with all in it; of links the link alone.

    `tf.io.gfile.rmtree` removes files in the folders that links lead to.

    Raises:
        tf.errors.OpError: it can't be removed.
    """
    local = path.removeprefix("file://")
    if "://" in local:
        if tf.io.gfile.exists(path):
            tf.io.gfile.rmtree(path)
        return
    try:
        if os.path.islink(local):
            os.remove(local)
        elif os.path.lexists(local):
            shutil.rmtree(local)
    except OSError as error:
        raise tf.errors.UnknownError(
            None, None, f"'{path}' can't be removed: {error}."
        ) from error
