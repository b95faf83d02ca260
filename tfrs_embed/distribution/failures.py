"""Failures of one worker, raised on all of them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.graphs import TracedOnce
from tfrs_embed.distribution import replicas

# By strategy, what returns the largest of all workers' numbers.
_largest: Any = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def raised_on_all_workers(
    strategy: tf.distribute.Strategy, what: str
) -> Iterator[None]:
    """Raises an error on all workers if the context fails on one of them.

    All workers enter and leave the context together. The others raise a
    RuntimeError that says that `what` has failed.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    failed = largest_of_workers(strategy, int(error is not None))
    if failed and error is None:
        error = RuntimeError(f"{what} failed on another worker.")
    if error is not None:
        raise error


def largest_of_workers(strategy: tf.distribute.Strategy, number: int) -> int:
    """Returns the largest of all workers' numbers, which are below 2^63.

    All workers of a `MultiWorkerMirroredStrategy` call it together. Others are
    one worker.
    """
    if not isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):
        return number
    shared = replicas.get_replicas(strategy)
    if shared.world == 1:
        return number
    if strategy not in _largest:
        channel = shared.allocate(1)

        def largest(number: tf.Tensor) -> list[tf.Tensor]:
            local = range(shared.local)
            return [shared.max(i, number, channel) for i in local]

        _largest[strategy] = TracedOnce(largest, tf.TensorSpec([], tf.int64))
    found, *_ = _largest[strategy](tf.constant(number, tf.int64))
    return int(found)
