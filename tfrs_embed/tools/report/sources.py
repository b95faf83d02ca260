"""Which kind of source a path is, and the part of a page about it."""

from __future__ import annotations

from collections.abc import Sequence

from tfrs_embed.checkpoint import listing
from tfrs_embed.tools.command_line import InputError
from tfrs_embed.tools.conversion import exported
from tfrs_embed.tools.conversion import paths as paths_lib
from tfrs_embed.tools.report import statistics_log
from tfrs_embed.tools.report.checkpoints import checkpoints
from tfrs_embed.tools.report.page import PagePart

_KINDS = (
    "A report needs a checkpoint, a folder of some, a SavedModel of "
    "tfrs_embed.serving.export, or a folder with tables.jsonl."
)


def read(paths: Sequence[str]) -> list[PagePart]:
    """Returns the parts about some paths; the last one is of all checkpoints.

    Raises:
        ValueError: a path is of no known kind, or its contents are wrong.
        OSError: a file can't be read.
        tf.errors.OpError: a checkpoint is damaged.
    """
    parts: list[PagePart] = []
    run: list[str] = []
    try:
        for given in paths:
            path = paths_lib.resolve(given, "path")
            if statistics_log.is_log(path):
                parts.append(statistics_log.statistics_log(path))
                # It may have checkpoints, too.
                run += listing.checkpoints(path)
            elif exported.is_saved_model(path):
                parts.append(checkpoints([path]))
            else:
                run += listing.checkpoints(path) or [path]
        return [*parts, checkpoints(run)] if run else parts
    except InputError as error:
        raise ValueError(f"{error} {_KINDS}") from None
