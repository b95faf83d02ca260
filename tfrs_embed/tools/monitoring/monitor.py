"""The measuring of a layer's tables, and of their changes between reports."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfrs_embed.compat.arguments import integer_or_none
from tfrs_embed.configs.dynamic_keys import MICROSECONDS
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.storage import clock
from tfrs_embed.storage.dynamic_table import DynamicTable, local_counters
from tfrs_embed.storage.table_state import TableState
from tfrs_embed.tools.monitoring import lookups, rows
from tfrs_embed.tools.monitoring.reports import (
    DiskReport,
    FileReport,
    KeyReport,
    LookupReport,
    ReplicaReport,
    StatisticsReport,
    TableReport,
    quantiles,
    top_shares,
)

#: The numbers of steps for which the share of idle rows is reported.
IDLE_STEPS = (1_000, 10_000, 100_000, 1_000_000)
#: The numbers of days for which a table that counts in time reports the same.
IDLE_DAYS = (1, 7, 30, 90)

_NO_USE = DiskReport(0, 0, 0, 0)


@dataclasses.dataclass(eq=False)
class _Before:
    """A table's rows as they were in the last report.

    Attributes:
        rows: the rows.
        changed: the step of the last report that found the row changed, [n]
            int64; of rows that never changed `first - 1`.
        first: the step of the first report.
    """

    rows: rows.ReadRows
    changed: np.ndarray
    first: int


class TableMonitor:
    """Measures a layer's tables, and their changes since the last report.

    Custom training loops call it between steps; `TableStatistics` is the Keras
    callback.

    Changes are those of up to 10,000 of the rows that are read of each of a
    table's shards: a monitor keeps their values. Each of several workers
    measures the rows in its own memory, without waiting for the others.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     tfrs_embed.FeatureConfig("movie", movies), "adagrad"
        ... )
        >>> layer.build(None)
        >>> monitor = tfrs_embed.monitoring.TableMonitor(layer)
        >>> monitor.measure()["movies"].untouched_share
        1.0
        >>> with tf.GradientTape() as tape:
        ...     loss = tf.reduce_sum(layer(tf.range(200)))
        >>> gradients = tape.gradient(loss, layer.trainable_variables)
        >>> report = monitor.measure()
        >>> report["movies"].changed_share
        0.01

    Args:
        layer: a layer with tables.
        tables: the names of the tables to measure; None: all.
        sample: about how many rows of a table to read, the same rows each time;
            None: all, in blocks.

    Raises:
        TypeError: the layer has no tables that can be measured.
        ValueError: there is no table of a name, or `sample` is not an integer
            of at least 1.
    """

    def __init__(
        self,
        layer: Any,
        tables: Sequence[str] | None = None,
        sample: int | None = None,
    ) -> None:
        if not is_layer(layer):
            raise TypeError(
                "TableMonitor needs a layer with tables in engines, such as "
                f"PartialTPUEmbedding, got {type(layer).__name__}."
            )
        self._sample = integer_or_none(sample, "sample")
        self._layer = layer
        known = table_names(layer)
        for name in tables or ():
            if name not in known:
                raise ValueError(
                    f"Layer '{layer.name}' has no table '{name}'; its tables "
                    f"are {known}."
                )
        self._names = known if tables is None else list(dict.fromkeys(tables))
        self._before: dict[str, _Before] = {}
        # Unique keys and bytes of each replica up to the last report.
        self._traffic: Any = 0
        self._disk = _NO_USE  # The process's, up to then.

    def measure(
        self, step: int | None = None, batches: Any = None
    ) -> StatisticsReport:
        """Measures the tables.

        Args:
            step: the number of the step, for the report; None: the layer's own
                count of its updates, or 0 if it has none.
            batches: global batches in which lookups are counted, see
                `lookup_statistics`; None: no lookups are counted.

        Returns:
            The statistics.

        Raises:
            ValueError: the layer was neither called nor built, or a batch
                doesn't fit its features.
            TypeError: ids of a batch are of a wrong kind.
        """
        states = self._layer.tables
        if not all(states[name].variables for name in self._names):
            raise ValueError(
                f"Layer '{self._layer.name}' has no tables yet: call or build "
                "it first."
            )
        if step is None:
            own = self._layer.step
            step = 0 if own is None else int(np.asarray(own.numpy()))
        on_disk = any(states[name].spec.has_files for name in self._names)
        disk = _disk(step, self._disk) if on_disk else None
        counted: dict[str, LookupReport] = {}
        if batches is not None:
            counted = lookups.lookup_statistics(self._layer, batches)
        tables = [
            self._measure(states[name], step, counted.get(name))
            for name in self._names
        ]
        if on_disk:
            self._disk = _disk(step)
        return StatisticsReport(
            self._layer.name, step, tuple(tables), self._replicas(), disk
        )

    def _measure(
        self, state: TableState, step: int, counted: LookupReport | None
    ) -> TableReport:
        files = None
        if state.spec.storage is not None:
            from tfrs_embed.storage.mapped_files import in_memory

            files = FileReport(*in_memory(state.spec))
        now = rows.read(state, self._sample)
        names = (PARAMETERS, *state.slots)
        held = {name: state.saved[name].held() for name in names}
        report = TableReport(
            table=state.spec.name,
            rows=sum(part.rows for part in held[PARAMETERS]),
            dim=state.spec.dim,
            dtype=state.table.dtype.name,
            bytes=sum(p.bytes for parts in held.values() for p in parts),
            rows_read=len(now.norms),
            norms=quantiles(now.norms[np.isfinite(now.norms)]),
            nonfinite_rows=now.nonfinite,
            untouched_share=now.untouched,
            untouched_by=None if now.untouched is None else "slots",
            lookups=counted,
            files=files,
        )
        report = self._compare(report, now, step)
        return _with_keys(report, state, step)

    def _compare(
        self, report: TableReport, now: rows.ReadRows, step: int
    ) -> TableReport:
        """Adds changes since the last report, and keeps this report's rows."""
        size = len(now.ids)
        before = self._before.get(report.table)
        first = step if before is None else before.first
        changed = np.full(size, first - 1, np.int64)
        more: dict[str, Any] = {}
        if before is not None and size:
            moved = np.ones(size, bool)  # As new keys have.
            old, new = rows.common(before.rows.ids, now.ids)
            last, value = before.rows.values[old], now.values[new]
            moved[new] = (last.view(np.uint8) != value.view(np.uint8)).any(1)
            changed[new] = before.changed[old]
            changed[moved] = step
            with np.errstate(over="ignore", invalid="ignore"):
                norms = rows.norms(
                    value.astype(np.float32) - last.astype(np.float32)
                )
            more["changed_share"] = float(moved.mean())
            more["update_norms"] = quantiles(
                norms[np.isfinite(norms) & (norms > 0)]
            )
            more["idle_shares"] = _idle_shares(
                np.maximum(changed, first), step, step - first
            )
            if report.untouched_share is None:
                more["untouched_share"] = float(np.mean(changed < first))
                more["untouched_by"] = "values"
        self._before[report.table] = _Before(now, changed, first)
        return dataclasses.replace(report, **more)

    def _replicas(self) -> tuple[ReplicaReport, ...]:
        engine_layer = self._layer._engine_layer
        if engine_layer is None:
            return ()
        traffic = engine_layer.engine.traffic()
        now = np.array([(t.unique_keys, t.bytes) for t in traffic], np.int64)
        since, self._traffic = (now - self._traffic).tolist(), now
        return tuple(ReplicaReport(i, *each) for i, each in enumerate(since))


def _disk(step: int, before: DiskReport = _NO_USE) -> DiskReport:
    """This process's use of disks until now, after `before`."""
    # Windows lacks it, and files that are tables.
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    return DiskReport(
        step - before.steps,
        512 * used.ru_inblock - before.read_bytes,
        512 * used.ru_oublock - before.written_bytes,
        used.ru_majflt - before.page_faults,
    )


def _idle_shares(used: np.ndarray, step: int, known: int) -> dict[int, float]:
    """Returns the shares of rows that were last used `n` steps ago or more.

    Args:
        used: the step in which each row was last used, [n].
        step: the step now.
        known: for how many steps back `used` is known.
    """
    return {
        n: float(np.mean(used <= step - n)) for n in IDLE_STEPS if n <= known
    }


def _with_keys(
    report: TableReport, state: TableState, step: int
) -> TableReport:
    """Adds the counters of a table with `DynamicKeys`."""
    if not isinstance(state, DynamicTable):
        return report
    live, counts = local_counters(state)
    size = len(live.keys)
    rules = state.built("the counters of keys").rules
    # Scores say nothing about lookups.
    shares = {} if rules.scored else top_shares(live.frequency, size)
    steps: dict[int, float] = {}
    days: dict[int, float] = {}
    if size and rules.by_time:
        ages = (clock.now() - live.last_used) / MICROSECONDS["days"]
        days = {n: float(np.mean(ages >= n)) for n in IDLE_DAYS}
    elif size:
        steps = _idle_shares(live.last_used, step, step)
    return dataclasses.replace(
        report,
        idle_shares=steps,
        idle_days=days,
        keys=KeyReport(
            size=size,
            top_share=shares.get(0.01, 0.0),
            top_shares=shares,
            **counts,
        ),
    )


def is_layer(layer: Any) -> bool:
    """Whether a layer has tables that can be measured."""
    return hasattr(layer, "_engine_layer") and hasattr(layer, "statistics")


def table_names(layer: Any) -> list[str]:
    """Returns the names of a layer's tables."""
    return [table.name for table in layer._spec.tables]
