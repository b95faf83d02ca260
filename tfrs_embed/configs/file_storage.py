"""Declaration of the files that hold rows."""

from __future__ import annotations

import dataclasses
import os

from tfrs_embed.compat.arguments import convert_fields, integer_or_none, text


@dataclasses.dataclass(frozen=True)
class FileStorage:
    """Keeps rows and slots in files, where there are more than memory holds.

    As the `storage` of a table, it has all of the table's rows. The files are
    mapped into memory: the operating system keeps the pages in use there, and
    writes changed ones back. Each device has files of its own,
    `<folder>/<table>/<device>/parameters` and `/<slot>`.

    As the `spill` of `DynamicKeys`, it has the rows of keys that lost theirs in
    memory to others. Each device has one file, without a name: it is gone with
    the process.

    Numbers, errors and checkpoints are those of a table in memory. The files
    are the table while the process lives. A new process begins with initial
    values, and overwrites files that an earlier one left: restore a checkpoint
    to go on.

    In a table's name "/", a backslash and NUL become their codes, as in URLs,
    and so do the names "." and "..". On disks that ignore case, tables whose
    names differ in case alone need folders of their own. Symbolic links in
    `folder`, and folders of users other than this one, root and the owner of
    `folder`, are an error: their owners could make this process write to other
    files.

    Example:
        >>> table = tfrs_embed.TableConfig(
        ...     "movie", 20_000, 64, storage=tfrs_embed.FileStorage("tables")
        ... )
        >>> table.storage.folder
        'tables'

    Attributes:
        folder: a folder on a local disk with room for all rows and slots. It is
            made if it is missing. Several tables may share it. Several
            processes may not if it is a table's storage, except workers of one
            cluster.
        max_bytes: the most bytes that a table's files may take on each device.
            None: what the disk has.

    Raises:
        TypeError: the folder is no path, or empty.
        ValueError: max_bytes is not an integer >= 1.
    """

    folder: str
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        folder = self.folder
        if isinstance(folder, os.PathLike):
            object.__setattr__(self, "folder", os.fspath(folder))
        text(self.folder, "FileStorage: folder")
        convert_fields(self, "FileStorage", max_bytes=integer_or_none)
