"""Declares that a table's rows and slots are in files."""

from __future__ import annotations

import dataclasses
import os

from tfrs_embed.compat.arguments import text


@dataclasses.dataclass(frozen=True)
class FileStorage:
    """Keeps a table's rows and slots in files, for tables larger than memory.

    The files are mapped into memory: the operating system keeps the pages in
    use there, and writes changed ones back. Numbers, errors and checkpoints are
    those of a table in memory. Each device has files of its own,
    `<folder>/<table>/<device>/parameters` and `/<slot>`.

    The files are the table while the process lives. A new process begins with
    initial values, and overwrites files that an earlier one left: restore a
    checkpoint to go on.

    Example:
        >>> table = tfrs_embed.TableConfig(
        ...     "movie", 20_000, 64, storage=tfrs_embed.FileStorage("tables")
        ... )
        >>> table.storage.folder
        'tables'

    Attributes:
        folder: a folder on a local disk with room for all rows and slots. It is
            made if it is missing. Several tables may share it, several
            processes may not, except workers of one cluster.

    Raises:
        TypeError: the folder is no path, or empty.
    """

    folder: str

    def __post_init__(self) -> None:
        folder = self.folder
        if isinstance(folder, os.PathLike):
            object.__setattr__(self, "folder", os.fspath(folder))
        text(self.folder, "FileStorage: folder")
