"""Tables, measured from one report to the next."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from tfrs_embed.checkpoint.rows import FREQUENCY, LAST_USED, HeldRows
from tfrs_embed.compat.arguments import as_int
from tfrs_embed.ops.update import PARAMETERS
from tfrs_embed.storage.dynamic import DynamicTable
from tfrs_embed.storage.state import TableState
from tfrs_embed.tools.monitoring import lookups, rows
from tfrs_embed.tools.monitoring.reports import (
    KeyReport,
    LookupReport,
    ReplicaReport,
    StatisticsReport,
    TableReport,
    quantiles,
    top_share,
    top_shares,
)
from tfrs_embed.tools.monitoring.rows import Seen

#: For how many steps rows may have been left alone, where that is counted.
IDLE_STEPS = (1_000, 10_000, 100_000, 1_000_000)


class TableMonitor:
    """Measures a layer's tables, and what changed since it last did.

    It is for training loops of one's own, between steps; `TableStatistics` is
    the Keras callback. It changes nothing: updates that a pipelined layer has
    deferred stay deferred, and aren't seen yet.

    It remembers 28 bytes of each row that it reads, and the values of up to
    10,000 rows of a table. With several workers each measures the rows that it
    holds itself, and none waits for another.

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
        ...     loss = tf.reduce_sum(layer(tf.constant([3, 7])))
        >>> gradients = tape.gradient(loss, layer.trainable_variables)
        >>> report = monitor.measure()
        >>> report["movies"].changed_share
        0.0001

    Args:
        layer: a layer that has its tables: one that was called or built.
        tables: the names of the tables to measure; None: all.
        sample: about how many rows of a table to read, always the same ones;
            None: all, in blocks.

    Raises:
        TypeError: the layer has no such tables, or the sample is no integer.
        ValueError: a name is no table's, or the sample is below 1.
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
        self._sample = check_sample(sample)
        self._layer = layer
        known = list(_states(layer))
        for name in tables or ():
            if name not in known:
                raise ValueError(
                    f"Layer '{layer.name}' has no table '{name}'; its tables "
                    f"are {known}."
                )
        self._names = known if tables is None else list(dict.fromkeys(tables))
        self._seen: dict[str, Seen] = {}
        self._traffic: list[tuple[int, int]] = []

    def measure(
        self, step: int | None = None, batches: Any = None
    ) -> StatisticsReport:
        """Measures the tables.

        Args:
            step: the number of the step, for the report; None: the layer's own
                count of its updates, 0 without one.
            batches: global batches to count lookups of, see
                `lookup_statistics`; None: none are counted.

        Returns:
            The statistics.

        Raises:
            ValueError: the layer has no tables yet, or a batch is none of its.
            TypeError: ids of a batch are of a wrong kind.
        """
        states = _states(self._layer)
        if not all(states[name].variables for name in self._names):
            raise ValueError(
                f"Layer '{self._layer.name}' has no tables yet: call or build "
                "it first."
            )
        if step is None:
            own = self._layer.step
            step = 0 if own is None else int(np.asarray(own.numpy()))
        counted: dict[str, LookupReport] = {}
        if batches is not None:
            counted = lookups.count(self._layer._spec, states, batches)
        return StatisticsReport(
            self._layer.name,
            step,
            tuple(
                self._measure(states[name], step, counted.get(name))
                for name in self._names
            ),
            self._replicas(),
        )

    def _measure(
        self, state: TableState, step: int, counted: LookupReport | None
    ) -> TableReport:
        held = state.held(PARAMETERS)
        slots = {name: state.held(name) for name in state.slots}
        initial = state.initial_slots
        found = [
            _read(
                part,
                [(slots[name][i], value) for name, value in initial.items()],
                rows.sample(part, self._sample),
                sum(each.rows for each in held[:i]),
            )
            for i, part in enumerate(held)
        ]
        every = _Rows.join(found, state.spec.dim)
        report = TableReport(
            table=state.spec.name,
            rows=sum(part.rows for part in held),
            dim=state.spec.dim,
            dtype=state.table.dtype.name,
            bytes=sum(p.bytes for p in held)
            + sum(p.bytes for parts in slots.values() for p in parts),
            rows_read=len(every.ids),
            norms=quantiles(every.norms[np.isfinite(every.norms)]),
            nonfinite_rows=int(np.sum(every.nonfinite)),
            lookups=counted,
        )
        report = self._compare(report, state, every, held, step)
        return _with_keys(report, state, step)

    def _compare(
        self,
        report: TableReport,
        state: TableState,
        now: _Rows,
        held: Sequence[HeldRows],
        step: int,
    ) -> TableReport:
        """Adds what is known by the last report, and keeps this one's rows."""
        name = state.spec.name
        before = self._seen.get(name)
        first = step if before is None else before.first
        changed = np.full(len(now.ids), first - 1, np.int64)
        moved = np.zeros(len(now.ids), bool)
        more: dict[str, Any] = {}
        read = len(now.ids) > 0  # There are no shares of no rows.
        if before is not None and read:
            place = before.find(now.ids)
            known = place >= 0
            moved = ~known  # A key that came has changed.
            moved[known] = (
                before.fingerprints[place[known]] != now.fingerprints[known]
            )
            changed[known] = before.changed[place[known]]
            changed[moved] = step
            more["changed_share"] = float(moved.mean())
            more["update_norms"] = _update_norms(before, now)
            span = step - first
            more["idle_shares"] = {
                n: float(np.mean(np.maximum(changed, first) <= step - n))
                for n in IDLE_STEPS
                if n <= span
            }
        if now.untouched is not None and read:
            more["untouched_share"] = float(now.untouched.mean())
            more["untouched_by"] = "slots"
        elif before is not None and read:
            more["untouched_share"] = float(np.mean(changed < first))
            more["untouched_by"] = "values"
        self._seen[name] = Seen(
            now.ids, now.fingerprints, changed, first, now.kept, now.values
        )
        return dataclasses.replace(report, **more)

    def _replicas(self) -> tuple[ReplicaReport, ...]:
        engine_layer = self._layer._engine_layer
        if engine_layer is None:
            return ()
        now = [(t.unique_keys, t.bytes) for t in engine_layer.engine.traffic()]
        before = self._traffic or [(0, 0)] * len(now)
        self._traffic = now
        return tuple(
            ReplicaReport(i, keys - old_keys, size - old_size)
            for i, ((keys, size), (old_keys, old_size)) in enumerate(
                zip(now, before, strict=True)
            )
        )


@dataclasses.dataclass(eq=False)
class _Rows:
    """What was read of some rows, ordered by their ids.

    Attributes:
        ids: the rows' numbers or keys, [n] int64.
        norms: [n] float32.
        nonfinite: whether a row has a NaN or an infinity, [n].
        fingerprints: [n] uint64.
        untouched: whether all slots have their initial values, [n]; None: there
            are no slots.
        kept: places in `ids` of the rows in `values`, [k].
        values: values of some of them, [k, dim] float32.
    """

    ids: np.ndarray
    norms: np.ndarray
    nonfinite: np.ndarray
    fingerprints: np.ndarray
    untouched: np.ndarray | None
    kept: np.ndarray
    values: np.ndarray

    @classmethod
    def join(cls, parts: Sequence[_Rows], dim: int) -> _Rows:
        """Joins those of several shards."""
        if not parts:
            nothing = np.zeros(0, np.int64)
            return cls(
                nothing,
                np.zeros(0, np.float32),
                np.zeros(0, bool),
                np.zeros(0, np.uint64),
                None,
                nothing,
                np.zeros([0, dim], np.float32),
            )
        ids = np.concatenate([p.ids for p in parts])
        order = np.argsort(ids, kind="stable")
        kept_ids = np.concatenate([p.ids[p.kept] for p in parts])
        values = np.concatenate([p.values for p in parts])
        by_id = np.argsort(kept_ids, kind="stable")
        untouched = [p.untouched for p in parts if p.untouched is not None]
        return cls(
            ids[order],
            np.concatenate([p.norms for p in parts])[order],
            np.concatenate([p.nonfinite for p in parts])[order],
            np.concatenate([p.fingerprints for p in parts])[order],
            np.concatenate(untouched)[order] if untouched else None,
            rows.find(ids[order], kept_ids[by_id]),
            values[by_id],
        )


def _read(
    held: HeldRows,
    slots: Sequence[tuple[HeldRows, float]],
    numbers: np.ndarray,
    offset: int,
) -> _Rows:
    """Reads some rows, in blocks.

    Args:
        held: the rows.
        slots: the same rows of each slot, and its initial value.
        numbers: which rows.
        offset: what the number of a row begins with, where it has no key.
    """
    norms, nonfinite, prints, values = [], [], [], []
    # Sampled places, at most so many, whatever the number of blocks.
    step = max(1, -(-len(numbers) // rows.KEPT_ROWS))
    done = 0
    for block in rows.read(held, numbers):
        length = rows.norms(block)
        norms.append(length)
        bad = ~np.isfinite(length)
        # The norm of large numbers may overflow.
        bad[bad] = ~np.isfinite(block[bad].astype(np.float64)).all(1)
        nonfinite.append(bad)
        prints.append(rows.fingerprints(block))
        values.append(block[-done % step :: step].astype(np.float32))
        done += len(block)
    untouched = None
    for slot, value in slots:
        same = np.concatenate(
            [np.zeros(0, bool)]
            + [
                (block == np.asarray(value, block.dtype)).all(1)
                for block in rows.read(slot, numbers)
            ]
        )
        untouched = same if untouched is None else untouched & same
    ids = numbers + offset if held.keys is None else held.keys[numbers]
    width = held.gather(np.zeros(0, np.int64)).shape[1]
    return _Rows(
        ids,
        np.concatenate([np.zeros(0, np.float32), *norms]),
        np.concatenate([np.zeros(0, bool), *nonfinite]),
        np.concatenate([np.zeros(0, np.uint64), *prints]),
        untouched,
        np.arange(0, len(numbers), step),
        np.concatenate([np.zeros([0, width], np.float32), *values]),
    )


def _update_norms(before: Seen, now: _Rows) -> dict[float, float]:
    """Quantiles of the norms of changes of the rows whose values are kept."""
    place = rows.find(before.ids[before.kept], now.ids[now.kept])
    both = place >= 0
    with np.errstate(over="ignore", invalid="ignore"):
        change = now.values[both] - before.values[place[both]]
    length = rows.norms(change)
    return quantiles(length[np.isfinite(length) & (length > 0)])


def _with_keys(
    report: TableReport, state: TableState, step: int
) -> TableReport:
    """Adds what a table knows of keys that come and go."""
    if not isinstance(state, DynamicTable):
        return report
    counted = state.local_counters()
    last_used, frequency = counted[LAST_USED], counted[FREQUENCY]
    size = len(last_used)
    shares = {
        n: float(np.mean(last_used <= step - n))
        for n in IDLE_STEPS
        if n <= step and size
    }
    numbers = state.local_statistics()
    return dataclasses.replace(
        report,
        idle_shares=shares,
        keys=KeyReport(
            size=size,
            capacity=sum(state.local_capacities()),
            top_share=top_share(frequency, size),
            top_shares=top_shares(frequency, size),
            **numbers,
        ),
    )


def is_layer(layer: Any) -> bool:
    """Whether a layer has tables that can be measured."""
    return hasattr(layer, "_engine_layer") and hasattr(layer, "statistics")


def check_sample(sample: Any) -> int | None:
    """Returns a number of rows to read, or None for all.

    Raises:
        TypeError: it is no integer.
        ValueError: it is below 1.
    """
    if sample is None:
        return None
    number = as_int(sample)
    if number is None:
        raise TypeError(f"sample must be an integer or None, got {sample!r}.")
    if number < 1:
        raise ValueError(f"sample must be at least 1, got {number}.")
    return number


def _states(layer: Any) -> dict[str, TableState]:
    """A layer's tables by name."""
    return {
        table.name: layer.tables[table.name] for table in layer._spec.tables
    }
