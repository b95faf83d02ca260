"""Adds builds to an installed package's list of files, for pip uninstall.

An unlisted build would stay after uninstalling, and with it the package's
folder, which Python would import as an empty package.
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

    A checkout, an editable installation and the cache have none. `content` is a
    file of the build's future content; `replaced` are older builds that will be
    removed.
    """
    if not build.parent.as_posix().endswith(f"/{_FOLDER}"):
        return
    for listed in build.parents[2].glob("tfrs_embed-*.dist-info/RECORD"):
        rows = list(csv.reader(listed.read_text("utf-8").splitlines()))
        files = {row[0] for row in rows if row}
        if f"{_FOLDER}/build.py" not in files:
            continue
        gone = {f"{_FOLDER}/{path.name}" for path in [build, *replaced]}
        data = content.read_bytes()
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest())
        checksum = digest.decode().rstrip("=")
        added = [f"{_FOLDER}/{build.name}", f"sha256={checksum}", len(data)]
        # In a new file: installers may share the old one between environments.
        copy = listed.with_name(f"{listed.name}.{os.getpid()}")
        with copy.open("w", encoding="utf-8", newline="") as file:
            kept = [row for row in rows if row and row[0] not in gone]
            csv.writer(file, lineterminator="\n").writerows([*kept, added])
        shutil.copymode(listed, copy)
        copy.replace(listed)
        return
