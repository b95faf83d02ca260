"""Builds among the files of an installed package, which pip removes with it.

pip uninstalls only the files that it knows of. An unknown build would stay, and
so would the package's folder, which Python would import as an empty package.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import os
import shutil
from collections.abc import Collection
from pathlib import Path

_FOLDER = "tfrs_embed/kernels"


def record(build: Path, content: Path, replaced: Collection[Path] = ()) -> None:
    """Adds a build to the list of its package's files, if there is one.

    There is none in a checkout, which an editable installation uses, nor in the
    cache.

    Args:
        build: where the build will be.
        content: a file of the same content.
        replaced: builds beside it that will be removed.

    Raises:
        OSError: the list can't be written.
    """
    listed = _list_of(build)
    if listed is None:
        return
    gone = {f"{_FOLDER}/{path.name}" for path in [build, *replaced]}
    lines = [
        line
        for line in listed.read_text("utf-8").splitlines()
        if _path_in(line) not in gone
    ]
    data = content.read_bytes()
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
    checksum = digest.decode().rstrip("=")
    lines.append(f"{_FOLDER}/{build.name},sha256={checksum},{len(data)}")
    # At once, and in a new file: installers may share the old one with others.
    copy = listed.with_name(f"{listed.name}.{os.getpid()}")
    copy.write_text("".join(f"{line}\n" for line in lines), "utf-8")
    shutil.copymode(listed, copy)
    copy.replace(listed)


def _list_of(build: Path) -> Path | None:
    """The list of files of the package that a build is put into."""
    if build.parent.as_posix().endswith(f"/{_FOLDER}"):
        installed = build.parents[2]
        for listed in installed.glob("tfrs_embed-*.dist-info/RECORD"):
            lines = listed.read_text("utf-8").splitlines()
            if any(_path_in(line) == f"{_FOLDER}/build.py" for line in lines):
                return listed
    return None


def _path_in(line: str) -> str:
    """The file of a line: of the list's three columns the first."""
    return next((row[0] for row in csv.reader([line]) if row), "")
