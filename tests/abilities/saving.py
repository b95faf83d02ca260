"""Ways of saving and loading a model, in one process and in a fresh one.

`python -m abilities.saving FOLDER LAYER...`, in the folder tests, loads what
another process has saved, and prints the numbers that it gets.
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from abilities.cases import (
    CASES,
    equal,
    equal_means,
    functional,
    masked,
    trained,
    trained_masked,
)
from keras_under_test import NUMBER, keras
from run_in_processes import environment

#: The layers whose masks, and loading in a fresh process, each change checks.
EACH_CHANGE = ("Embedding", "PartialTPUEmbedding, large")
_FOLDER = tempfile.TemporaryDirectory()


class Way(NamedTuple):
    """How a model is saved and loaded.

    Attributes:
        name: of the file.
        save: takes the model and the path.
        load: takes a function that makes such a model, and the path.
    """

    name: str
    save: Callable
    load: Callable


def _load_model(_, path):
    return keras.models.load_model(path, compile=False)


def _load_weights(make, path):
    model = make()
    model.load_weights(path)
    return model


def _restore(make, path):
    model = make()
    status = tf.train.Checkpoint(model=model).restore(path + "-1")
    status.assert_existing_objects_matched()
    return model


def _serve(_, path):
    loaded = tf.saved_model.load(path)
    return lambda ids: loaded.serve(tf.constant(ids))


WAYS = {
    "save as .keras": Way("m.keras", lambda m, p: m.save(p), _load_model),
    "save as .h5": Way("m.h5", lambda m, p: m.save(p), _load_model),
    "save_weights as .weights.h5": Way(
        "m.weights.h5", lambda m, p: m.save_weights(p), _load_weights
    ),
    "tf.train.Checkpoint": Way(
        "m", lambda m, p: tf.train.Checkpoint(model=m).save(p), _restore
    ),
    "model.export": Way("m", lambda m, p: m.export(p), _serve),
}
if NUMBER == 2:
    WAYS["save as a SavedModel"] = Way("m", lambda m, p: m.save(p), _load_model)


def _path(folder, title, case, masks):
    kind = "masks" if masks else "all"
    return f"{folder}/{title}/{case.name}/{kind}/{WAYS[title].name}"


@functools.cache
def _saved(title, case, masks):
    path = _path(_FOLDER.name, title, case, masks)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    WAYS[title].save(trained_masked(case) if masks else trained(case), path)
    return _FOLDER.name


def _numbers(folder, title, case, masks):
    """What a model gives after it was loaded."""
    make = functools.partial(masked if masks else functional, case)
    model = WAYS[title].load(make, _path(folder, title, case, masks))
    return np.asarray(model(case.padded_ids if masks else case.ids))


def loads(title, case):
    """Checks the vectors of a loaded model."""
    equal(_numbers(_saved(title, case, False), title, case, False), 1)


def loads_masked(title, case):
    """Checks the means behind masks of a loaded model."""
    equal_means(_numbers(_saved(title, case, True), title, case, True), 1)


def loads_afresh(title, case):
    """Checks both, of what a fresh process has loaded."""
    some = case.name in EACH_CHANGE
    names = [c.name for c in CASES if (c.name in EACH_CHANGE) is some]
    equal(_afresh(title, case, False, tuple(names)), 1)
    if case.masked:
        equal_means(_afresh(title, case, True, tuple(names)), 1)


def _afresh(title, case, masks, names):
    _saved(title, case, masks)
    found = _load_all(names)[f"{title}, {case.name}, {masks}"]
    if isinstance(found, str):
        kind, _, text = found.partition(": ")
        raise type(kind, (Exception,), {})(text)
    return found


def _all_of(names):
    """The saved models of some layers: their way, case, and whether masked."""
    cases = [case for case in CASES if case.name in names]
    for title, case in itertools.product(WAYS, cases):
        for masks in (False, True) if case.masked else (False,):
            yield title, case, masks


@functools.cache
def _load_all(names):
    """The numbers, or the error, of each model that one process has loaded."""
    for title, case, masks in _all_of(names):
        # Its own cell has the error.
        with contextlib.suppress(Exception):
            _saved(title, case, masks)
    done = subprocess.run(
        [sys.executable, "-m", "abilities.saving", _FOLDER.name, *names],
        cwd=pathlib.Path(__file__).parents[1],
        env={**os.environ, **environment("")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return json.loads(done.stdout.splitlines()[-1])


def main(folder, *names):
    """Loads all models of some layers, and prints their numbers as JSON."""
    found = {}
    for title, case, masks in _all_of(names):
        key = f"{title}, {case.name}, {masks}"
        try:
            found[key] = _numbers(folder, title, case, masks).tolist()
        except Exception as error:
            found[key] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
