"""Which kind of source a path is, and the part of a page about it."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.checkpoint import listing
from tfrs_embed.compat import strict_json
from tfrs_embed.tools.command_line import InputError
from tfrs_embed.tools.conversion import exported
from tfrs_embed.tools.conversion import paths as paths_lib
from tfrs_embed.tools.report import limits, plans, statistics_log
from tfrs_embed.tools.report.checkpoints import checkpoints
from tfrs_embed.tools.report.page import PagePart

_KINDS = (
    "A report needs a checkpoint, a folder of some, a SavedModel of "
    "tfrs_embed.serving.export, a folder with tables.jsonl, or the JSON of a "
    "plan or of a limits report."
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
                run += listing.checkpoints(
                    path
                )  # It may have checkpoints, too.
            elif exported.is_saved_model(path):
                parts.append(checkpoints([path]))
            elif path.endswith(".json"):
                parts.append(_json(path))
            else:
                run += listing.checkpoints(path) or [path]
        return [*parts, checkpoints(run)] if run else parts
    except InputError as error:
        raise ValueError(f"{error} {_KINDS}") from None


def _json(path: str) -> PagePart:
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            text = file.read()
    except tf.errors.NotFoundError:
        raise ValueError(f"There is no file '{path}'.") from None
    value = strict_json.parse(text, f"'{path}'")
    fields = set(value) if isinstance(value, dict) else set()
    try:
        if "per_replica" in fields:
            return plans.plan(path, text)
        if "stacks" in fields:
            return limits.limits(path, text)
    except ValueError as error:
        raise ValueError(f"'{path}': {error}") from None
    raise ValueError(
        f"'{path}' is neither a plan's JSON (Plan.to_json, plan --output) nor "
        "a limits report's (LimitsReport.to_json)."
    )
