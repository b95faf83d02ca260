"""How long training steps wait for their input."""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf


class InputWaits:
    """Measures the share of training's time that passes in waiting for batches.

    A share near 0 says that the input is as fast as batches in memory; one of
    0.3, that training would take 0.7 of its time with these.

    Only on one device: under a strategy other threads wait, too.

    Example:
        >>> waits = tfrs_embed.monitoring.InputWaits()
        >>> dataset = waits.watch(tf.data.Dataset.range(1_000).batch(10))
        >>> for batch in dataset.take(20):
        ...     pass  # A step.
        >>> 0 < waits.share() < 1
        True
    """

    def __init__(self) -> None:
        self._begin()

    def watch(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the dataset, whose iterators measure the time.

        It must be the last of the input's operations, after `prefetch`.
        Iterators can be saved as before. It takes 0.2 to 0.7 ms a batch.

        Args:
            dataset: the input of training, with any elements.

        Returns:
            A dataset of the same elements.
        """
        single = tf.data.Dataset.from_tensors

        def call(function: Any) -> tf.data.Dataset:
            # Stateless, so that TensorFlow saves the iterator. It makes `map`
            # parallel, and calls its function ahead; `flat_map` is in order.
            return tf.data.Dataset.counter().flat_map(
                lambda number: single(
                    tf.numpy_function(
                        function, [number], tf.int64, stateful=False
                    )
                )
            )

        # Whoever asks for an element gets those of all three, in this order.
        parts = (call(self._asked), dataset, call(self._answered))
        watched = tf.data.Dataset.zip(parts).flat_map(
            lambda _, element, __: single(element)
        )
        # A prefetch behind it would wait in place of the step.
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        count = dataset.cardinality()
        return watched.with_options(options).apply(
            tf.data.experimental.assert_cardinality(count)
        )

    def share(self) -> float | None:
        """Returns the share since the last call.

        Returns:
            A number from 0 to 1; None: there was no batch.
        """
        begin, waited = self._start, self._seconds
        self._begin()
        return waited / (self._start - begin) if waited else None

    def _begin(self) -> None:
        self._start = self._since = time.perf_counter()
        self._seconds = 0.0

    def _asked(self, number: Any) -> Any:
        self._since = time.perf_counter()
        return number

    def _answered(self, number: Any) -> Any:
        self._seconds += time.perf_counter() - self._since
        return number
