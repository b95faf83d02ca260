"""What a path is, and the part of a page that it has."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.tools.conversion import exported as exports
from tfrs_embed.tools.conversion import keras_files, sok
from tfrs_embed.tools.conversion import paths as paths_lib
from tfrs_embed.tools.report import (
    checkpoints,
    exported,
    limits,
    plans,
    statistics_log,
)
from tfrs_embed.tools.report.page import Part

_EXPECTED = (
    "expected a checkpoint, a folder of some, a SavedModel of "
    "tfrs_embed.serving.export, a folder with tables.jsonl, or the JSON of a "
    "plan or of a limits report"
)


def read(paths: Sequence[str]) -> list[Part]:
    """Makes the parts of a page.

    Args:
        paths: where their sources are. All checkpoints are one part.

    Returns:
        The parts, in the order of their sources.

    Raises:
        ValueError: a path is of no known kind, or its contents are wrong.
        OSError: a file can't be read.
        tf.errors.OpError: a checkpoint is damaged.
    """
    run: list[str] = []
    parts: list[Part | None] = []
    place = 0
    for given in paths:
        path = paths_lib.resolve(given, "path")
        of_path: list[str] = []
        if statistics_log.is_log(path):
            parts.append(statistics_log.statistics_log(path))
            if tf.io.gfile.isdir(path):  # Which may have both.
                of_path = _listed(path)
        elif exports.is_saved_model(path):
            parts.append(exported.exported(path))
        elif _is_json(path):
            parts.append(_json(path))
        else:
            of_path = _checkpoints(path)
        if of_path and not run:
            place = len(parts)
            parts.append(None)
        run += of_path
    if run:
        parts[place] = checkpoints.checkpoints(run)
    return [part for part in parts if part is not None]


def _is_json(path: str) -> bool:
    """Whether a path is named as JSON is, or is a file that begins so."""
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
        raise ValueError(f"'{path}' is no JSON: {error}.") from None
    if isinstance(value, dict) and "report" in value:
        value = value["report"]  # Of tfrs-embed limits --json.
        text = json.dumps(value)
    try:
        if isinstance(value, dict) and "per_replica" in value:
            return plans.plan(path, text)
        if isinstance(value, dict) and "stacks" in value:
            return limits.limits(path, text)
    except ValueError as error:
        raise ValueError(f"'{path}': {error}") from None
    hint = ""
    if isinstance(value, dict) and {"tables", "features"} <= set(value):
        hint = (
            " It looks like what `plan` reads: make a plan of it first, with "
            "tfrs-embed plan CONFIG.json --output PLAN.json."
        )
    raise ValueError(
        f"'{path}' is neither a plan's JSON (Plan.to_json, plan --output) nor "
        f"a limits report's (LimitsReport.to_json, limits --json).{hint}"
    )


def _checkpoints(path: str) -> list[str]:
    """The checkpoints that a path stands for: a folder for all of its own."""
    if tf.io.gfile.isdir(path):
        if every := _listed(path):
            return every
        if not (
            sok.is_folder(path)
            or tf.io.gfile.glob(os.path.join(path, "*.index"))
        ):
            raise ValueError(f"The folder '{path}' has none: {_EXPECTED}.")
        return [path]
    if tf.io.gfile.exists(f"{path.removesuffix('.index')}.index"):
        return [path]
    if not tf.io.gfile.exists(path):
        raise ValueError(f"There is nothing at '{path}': {_EXPECTED}.")
    if not keras_files.is_file(path):
        raise ValueError(f"'{path}' is of no known kind: {_EXPECTED}.")
    return [path]


def _listed(folder: str) -> list[str]:
    """The checkpoints that a folder's own file lists, if they are there."""
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
