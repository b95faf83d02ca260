"""What functions share that all workers of a model call together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.chain import Link
from tfrs_embed.compat import keras_versions
from tfrs_embed.compat.files import temporary_folder
from tfrs_embed.distribution import replicas
from tfrs_embed.storage.gathering import Gathering

_gatherings: Any = weakref.WeakKeyDictionary()


def strategy_of(model: Any) -> tf.distribute.Strategy:
    """Returns the strategy under which a model was made."""
    for weight in model.weights:
        variable = keras_versions.variable(weight)
        strategy = getattr(variable, "_distribute_strategy", None)
        if strategy is not None:
            return strategy
    return tf.distribute.get_strategy()


def joined(strategy: tf.distribute.Strategy, numbers: np.ndarray) -> np.ndarray:
    """Joins [n] int64 of all workers, in one order; all must call."""
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return numbers
    shared = replicas.get_replicas(strategy)
    if strategy not in _gatherings:
        _gatherings[strategy] = Gathering(shared, "export a model")
    none = [np.zeros([0], np.int64)] * (shared.local - 1)
    return np.concatenate(_gatherings[strategy]([numbers, *none]))


def agreed(strategy: tf.distribute.Strategy, link: Link) -> Link:
    """Returns the link of one of the workers, the same on all of them.

    Raises a ValueError if they continue different files.
    """
    mine = np.array([link.chain, link.number, link.id, link.since])
    links = joined(strategy, mine).reshape(-1, len(mine))
    if link.number and len(np.unique(links[:, [0, 1, 3]], axis=0)) > 1:
        raise ValueError("The workers give different paths in since.")
    return Link(*links[0].tolist(), previous=link.previous)


@contextlib.contextmanager
def incomplete(path: str, is_chief: bool) -> Iterator[str]:
    """Yields the folder `path` + ".incomplete": the chief makes and removes it.

    The other workers see it after they have waited for the chief.
    """
    folder = f"{path}.incomplete"
    with temporary_folder(folder) if is_chief else contextlib.nullcontext():
        yield folder
