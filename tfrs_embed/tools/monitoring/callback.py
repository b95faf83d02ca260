"""Statistics of tables while Keras trains."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import keras_versions
from tfrs_embed.compat.arguments import integer, integer_or_none
from tfrs_embed.tools.monitoring.log import StatisticsLog
from tfrs_embed.tools.monitoring.monitor import (
    TableMonitor,
    is_layer,
    table_names,
)
from tfrs_embed.tools.monitoring.reports import StatisticsReport
from tfrs_embed.tools.planner.inputs import MOST_BATCHES


class TableStatistics(keras_versions.PlainCallback):
    """A callback of tf_keras or Keras 3 that writes statistics of tables.

    Before the first step, every `every` steps and when training ends it
    measures the tables of all layers, as `TableMonitor` does, and writes the
    statistics to TensorBoard's files and to `tables.jsonl`, which `read_log`
    reads.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", movies), "adagrad"
        ... )
        >>> model = tf_keras.Sequential([layer, tf_keras.layers.Dense(1)])
        >>> model.compile("adam", "mse")
        >>> statistics = tfrs_embed.monitoring.TableStatistics(
        ...     "logs", sample=None
        ... )
        >>> history = model.fit(
        ...     np.array([3, 7]),
        ...     np.array([0.0, 1.0]),
        ...     callbacks=[statistics],
        ...     verbose=0,
        ... )
        >>> [last] = statistics.reports
        >>> last["movies"].untouched_share
        0.9999

    Args:
        log_dir: the folder to write to.
        every: the number of steps between two reports.
        tables: the names of the tables to measure; None: all.
        sample: about how many rows of a table to read; None: all, in blocks.
        batches: global batches of the layer's inputs, without labels. The
            first 32 are read at once and kept; each report counts their
            lookups. None: no lookups are counted. The model must have one
            layer with tables.

    Attributes:
        reports: the last report of each layer.

    Raises:
        ValueError: `every` or `sample` is not an integer of at least 1.
    """

    def __init__(
        self,
        log_dir: Any,
        every: int = 1000,
        tables: Sequence[str] | None = None,
        *,
        sample: int | None = 10_000,
        batches: Any = None,
    ) -> None:
        self._every = integer(every, "every")
        self._log_dir = log_dir
        self._tables = None if tables is None else list(tables)
        self._sample = integer_or_none(sample, "sample")
        # Read once: an iterator has batches for one report only.
        self._batches = (
            None
            if batches is None
            else list(itertools.islice(batches, MOST_BATCHES))
        )
        self.reports: list[StatisticsReport] = []
        self._begin()

    def _begin(self) -> None:
        self._monitors: dict[int, TableMonitor] = {}
        self._log: StatisticsLog | None = None
        self._step = 0
        self._in_epoch = 0

    def on_train_begin(self, logs: Any = None) -> None:
        """Checks arguments, and measures tables that were built before.

        Raises:
            ValueError: the model has no layer with tables, no table of a name
                in `tables`, or several layers with tables for one list of
                batches.
        """
        self._begin()
        layers = self._layers()
        if not layers:
            raise ValueError(
                f"Model '{self._model.name}' has no layer with tables that "
                "TableStatistics can measure."
            )
        known = [n for layer in layers for n in table_names(layer)]
        for name in self._tables or ():
            if name not in known:
                raise ValueError(
                    f"Model '{self._model.name}' has no table '{name}'; its "
                    f"tables are {known}."
                )
        if self._batches is not None and len(layers) > 1:
            raise ValueError(
                "TableStatistics counts lookups of batches for one layer; "
                f"model '{self._model.name}' has {[x.name for x in layers]}."
            )
        iterations = getattr(self._model.optimizer, "iterations", None)
        # A restored optimizer has counted steps before.
        self._step = 0 if iterations is None else int(iterations.numpy())
        self._log = StatisticsLog(self._log_dir, _worker_number())
        if any(layer._has_tables for layer in layers):
            self._report()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._in_epoch = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        end = self._steps_until(batch)
        done = end - self._in_epoch
        self._in_epoch = end
        before, self._step = self._step, self._step + done
        if self._step // self._every > before // self._every:
            self._report()

    def on_train_end(self, logs: Any = None) -> None:
        if {each.step for each in self.reports} != {self._step}:
            self._report()
        if self._log is not None:
            self._log.close()

    def _report(self) -> None:
        assert self._log is not None
        self.reports = []
        for layer in self._layers():
            # A layer that training doesn't call has no tables.
            names = table_names(layer) if layer._has_tables else []
            if self._tables is not None:
                names = [n for n in names if n in self._tables]
            if not names:
                continue
            monitor = self._monitors.setdefault(
                id(layer), TableMonitor(layer, names, self._sample)
            )
            report = monitor.measure(self._step, self._batches)
            self._log.write(report)
            self.reports.append(report)

    def _layers(self) -> list[Any]:
        """Returns the model's layers with tables, each once."""
        found = self._model._flatten_layers()
        return list({id(x): x for x in found if is_layer(x)}.values())


def _worker_number() -> int:
    """Returns this process's number among the strategy's workers."""
    resolver = tf.distribute.get_strategy().cluster_resolver
    return int(resolver.task_id or 0) if resolver is not None else 0
