"""Names the operations, and the user's lines, that an error is about."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Collection, Iterable
from typing import Any

from tfrs_embed.compat.graphs import operations
from tfrs_embed.tools.tpu_check.recording import RecordedFunction

#: The number of lines that are named.
_MOST = 5
_OWN = str(pathlib.Path(__file__).parents[2]) + os.sep


def locate(recorded: RecordedFunction, kinds: Collection[str]) -> list[str]:
    """Names a function's operations of some kinds, and the user's lines."""
    places = []
    for op in operations(recorded.function.graph):
        on_host = "_xla_outside_compilation" in op.node_def.attr
        if op.type not in kinds or on_host:
            continue
        place = _user_line(op.traceback)
        line = f"{op.type} '{op.name}'" + (f", {place}" if place else "")
        if line not in places:
            places.append(line)
    more = len(places) - _MOST
    if more > 0:
        places[_MOST:] = [f"and {more} more"]
    return places


def _user_line(frames: Iterable[Any] | None) -> str | None:
    """The innermost line outside of libraries, as "file:number"."""
    found = None
    for frame in frames or ():
        if not _is_library(frame.filename):
            found = f"{frame.filename}:{frame.lineno}"
    return found


def _is_library(filename: str) -> bool:
    parts = pathlib.PurePath(filename).parts
    return (
        filename.startswith((_OWN, "<"))
        or "site-packages" in parts
        or any(part.startswith("python3.") for part in parts)
    )
