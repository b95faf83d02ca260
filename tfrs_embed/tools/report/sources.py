"""Which kind of source a path is, and the part of a page about it."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Sequence

import tensorflow as tf

from tfrs_embed.tools.command_line import InputError
from tfrs_embed.tools.conversion import exported
from tfrs_embed.tools.conversion import paths as paths_lib
from tfrs_embed.tools.report import limits, plans, statistics_log
from tfrs_embed.tools.report.checkpoints import checkpoints
from tfrs_embed.tools.report.page import Part

_KINDS = (
    "A report needs a checkpoint, a folder of some, a SavedModel of "
    "tfrs_embed.serving.export, a folder with tables.jsonl, or the JSON of a "
    "plan or of a limits report."
)


def read(paths: Sequence[str]) -> list[Part]:
    """Returns the parts about some paths; all checkpoints are one part.

    Raises:
        ValueError: a path is of no known kind, or its contents are wrong.
        OSError: a file can't be read.
        tf.errors.OpError: a checkpoint is damaged.
    """
    run: list[str] = []
    make: list[Callable[[], Part]] = []
    for given in paths:
        path = paths_lib.resolve(given, "path")
        found: list[str] = []
        if statistics_log.is_log(path):
            make.append(functools.partial(statistics_log.statistics_log, path))
            found = _listed(path)  # A folder may have a log and checkpoints.
        elif exported.is_saved_model(path):
            make.append(functools.partial(checkpoints, [path]))
        elif _is_json(path):
            make.append(functools.partial(_json, path))
        else:
            found = _listed(path) or [path]
        if found and not run:
            make.append(functools.partial(checkpoints, run))
        run += found
    try:
        return [each() for each in make]
    except InputError as error:
        raise ValueError(f"{error} {_KINDS}") from None


def _is_json(path: str) -> bool:
    """Whether a path ends with ".json", or is a file that begins with "{"."""
    if path.endswith(".json"):
        return True
    if not tf.io.gfile.exists(path) or tf.io.gfile.isdir(path):
        return False
    with tf.io.gfile.GFile(path, "rb") as file:
        return file.read(64).lstrip().startswith(b"{")


def _json(path: str) -> Part:
    try:
        with tf.io.gfile.GFile(path, "rb") as file:
            text = file.read().decode("utf-8")
        value = json.loads(text)
    except tf.errors.NotFoundError:
        raise ValueError(f"There is no file '{path}'.") from None
    except ValueError as error:
        raise ValueError(f"'{path}' is not JSON: {error}.") from None
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


def _listed(folder: str) -> list[str]:
    """Returns the checkpoints that a folder's file lists and that exist."""
    try:
        state = tf.train.get_checkpoint_state(folder)
    except (ValueError, tf.errors.OpError) as error:
        raise ValueError(
            f"'{os.path.join(folder, 'checkpoint')}' does not say which "
            f"checkpoints are there: {error}"
        ) from error
    if state is None:
        return []
    return [
        each
        for each in state.all_model_checkpoint_paths
        if tf.io.gfile.exists(f"{each}.index")
    ]
