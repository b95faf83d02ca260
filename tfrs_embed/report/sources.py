"""What a path is, and the part of a page that it has."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.checkpoint.conversion import paths as paths_lib
from tfrs_embed.report import (
    checkpoints,
    exported,
    limits,
    plans,
    statistics_log,
)
from tfrs_embed.report.page import Part

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
        if statistics_log.is_log(path):
            parts.append(statistics_log.statistics_log(path))
        elif exported.is_exported(path):
            parts.append(exported.exported(path))
        elif path.endswith(".json"):
            parts.append(_json(path))
        else:
            if not run:
                place = len(parts)
                parts.append(None)
            run += _checkpoints(path)
    if run:
        parts[place] = checkpoints.checkpoints(run)
    return [part for part in parts if part is not None]


def _json(path: str) -> Part:
    try:
        text = pathlib.Path(path).read_text("utf-8")
        value = json.loads(text)
    except FileNotFoundError:
        raise ValueError(f"There is no file '{path}'.") from None
    except ValueError as error:
        raise ValueError(f"'{path}' is no JSON: {error}.") from None
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
            "python -m tfrs_embed plan CONFIG.json --output PLAN.json."
        )
    raise ValueError(
        f"'{path}' is neither a plan's JSON (Plan.to_json, plan --output) nor "
        f"a limits report's (LimitsReport.to_json).{hint}"
    )


def _checkpoints(path: str) -> list[str]:
    """The checkpoints that a path stands for: a folder for all of its own."""
    is_folder = tf.io.gfile.isdir(path)
    if is_folder:
        state = None
        try:
            state = tf.train.get_checkpoint_state(path)
        except (ValueError, tf.errors.OpError) as error:
            raise ValueError(
                f"'{os.path.join(path, 'checkpoint')}' does not say which "
                f"checkpoints are there: {error}"
            ) from error
        if state is not None:
            every = [
                each
                for each in state.all_model_checkpoint_paths
                if tf.io.gfile.exists(f"{each}.index")
            ]
            if every:
                return every
    elif not (
        tf.io.gfile.exists(path)
        or tf.io.gfile.exists(f"{path.removesuffix('.index')}.index")
    ):
        raise ValueError(f"There is nothing at '{path}': {_EXPECTED}.")
    elif not path.endswith((".index", ".keras", ".h5")) and not (
        tf.io.gfile.exists(f"{path}.index")
    ):
        raise ValueError(f"'{path}' is of no known kind: {_EXPECTED}.")
    elif not tf.io.gfile.exists(path) and path.endswith(".index"):
        raise ValueError(f"There is no checkpoint '{path}'.")
    return [path]
