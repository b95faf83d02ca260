"""Failures of one worker, raised on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf


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
    if isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy):

        @tf.function(autograph=False)
        def count_failed() -> tf.Tensor:
            def failed() -> tf.Tensor:
                replica: Any = tf.distribute.get_replica_context()
                return replica.all_reduce("sum", tf.constant(int(bool(error))))

            return strategy.experimental_local_results(strategy.run(failed))[0]

        if int(count_failed()) and error is None:
            error = RuntimeError(f"{what} failed on another worker.")
    if error is not None:
        raise error
