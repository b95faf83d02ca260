"""The plan for a configuration: checks, search, reasons, alternatives."""

from __future__ import annotations

import itertools
import math
import numbers
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed import configs
from tfrs_embed.configs import EmbeddingSpec, FeatureSpec, TableSpec, as_int
from tfrs_embed.optimizers import conversion
from tfrs_embed.planner import batches as batch_readers
from tfrs_embed.planner.candidates import PLACEMENTS, Candidate, Demand
from tfrs_embed.planner.hardware import Hardware, hardware
from tfrs_embed.planner.plans import (
    Plan,
    PlanAlternative,
    ReplicaPlan,
    TablePlan,
    format_seconds,
)
from tfrs_embed.planner.search import Found, Search
from tfrs_embed.planner.usage import (
    TableUsage,
    expected_usage,
    measured_usage,
)
from tfrs_embed.text_table import format_bytes

#: No more batches than these are read.
MOST_BATCHES = 32
#: That of the ids in docs/scaling.md.
ZIPF_EXPONENT = 1.05

# The placements of configs, as plans call them.
_KEPT = {
    "sharded": "row",
    "default_device": "replicated",
    **{name: name for name in PLACEMENTS},
}


def plan(
    feature_config: Any,
    batches_or_hotness: Any,
    *,
    replicas: int | None = None,
    memory_per_replica: int | None = None,
    topology: str | Hardware = "8xA100",
    optimizer: Any = None,
    batch_size: int | None = None,
    zipf_exponent: float = ZIPF_EXPONENT,
) -> Plan:
    """Plans where tables go: the least predicted step time that fits.

    Nothing is built: a plan is arithmetic on the tables' sizes and their use.
    docs/planning.md has the model, and what it does not know.

    Example:
        >>> users = tfrs_embed.TableConfig("users", 5_000_000, 64)
        >>> countries = tfrs_embed.TableConfig("countries", 200, 64)
        >>> plan = tfrs_embed.plan(
        ...     {
        ...         "user": tfrs_embed.FeatureConfig("user", users),
        ...         "country": tfrs_embed.FeatureConfig("country", countries),
        ...     },
        ...     {"user": 1, "country": 10},
        ...     replicas=8,
        ...     memory_per_replica=10**9,
        ...     optimizer="adagrad",
        ...     batch_size=8192,
        ... )
        >>> [(table.table, table.placement) for table in plan.tables]
        [('users', 'row'), ('countries', 'replicated')]

    Args:
        feature_config: a `FeatureConfig`, or a nesting of them, as layers have
            it. A table whose own `placement` is not "auto", or which has
            `keys`, is counted and not moved.
        batches_or_hotness: how tables are used. Hotness, the number of ids of a
            sample: one number for all features, or a dict with a number for
            each feature, by name or as the configuration is nested. Or a list,
            or a dataset, of global batches, of which at most 32 are read: each
            has the configuration's nesting, its leaves arrays, tensors (dense,
            ragged or sparse), lists of ids, or lists of samples' lists of ids.
        replicas: the number of replicas; None: those of one host.
        memory_per_replica: bytes that a replica has for tables and their slots;
            None: all that the hardware has.
        topology: the hardware: accelerators of a host, such as "8xA100" or
            "4xH100"; "cpu" for processes of one machine; or a `Hardware`.
        optimizer: the tables' optimizer, in any form that layers take; it
            decides how many slots tables have. A table's own wins. None: such
            tables have no slots.
        batch_size: samples of one replica; only with a hotness.
        zipf_exponent: of the law that ids follow, for a hotness: the frequency
            of the i-th most frequent id is proportional to 1 / i ** exponent.
            0: all ids of a table are equally frequent.

    Returns:
        The plan.

    Raises:
        ValueError: the tables don't fit, with what would; or a value is out of
            its range, names no feature, or contradicts another.
        TypeError: a value is of the wrong kind.
    """
    spec = configs.parse(feature_config)
    machine = hardware(topology)
    if replicas is None:
        if machine.replicas_per_host is None:
            raise ValueError(
                f"replicas must be given: the topology '{machine.name}' has "
                "any number."
            )
        replicas = machine.replicas_per_host
    count = _integer(replicas, "replicas")
    limit = machine.memory
    if memory_per_replica is not None:
        limit = _integer(memory_per_replica, "memory_per_replica")
    usage = _usage(spec, batches_or_hotness, count, batch_size, zipf_exponent)
    demands = [
        _demand(table, usage[table.name], optimizer) for table in spec.tables
    ]
    search = Search(demands, machine, limit)
    found = search.move_owners(search.best())
    if found.excess:
        found = search.move_owners(search.best_from_tightest())
    if found.excess:
        raise ValueError(_does_not_fit(search))
    others = _alternatives(search)
    fitting = filter(search.fits, others.values())
    found = min([found, *fitting], key=lambda each: each.key)
    samples = max(f.samples for u in usage.values() for f in u.features)
    return _plan(search, found, others, spec, samples)


def _integer(value: Any, what: str) -> int:
    number = as_int(value)
    if number is None or number < 1:
        raise ValueError(f"{what} must be an integer >= 1, got {value!r}.")
    return number


def _usage(
    spec: EmbeddingSpec,
    given: Any,
    replicas: int,
    batch_size: int | None,
    exponent: float,
) -> dict[str, TableUsage]:
    """Each table's use, by its name."""
    hotness = _hotness(spec, given)
    features = {
        table.name: [
            (i, f) for i, f in enumerate(spec.features) if f.table is table
        ]
        for table in spec.tables
    }
    if hotness is not None:
        if batch_size is None:
            raise ValueError(
                "batch_size must be given with a hotness: the samples of one "
                "replica."
            )
        size = _integer(batch_size, "batch_size")
        if (
            not _is_number(exponent)
            or not math.isfinite(exponent)
            or exponent < 0
        ):
            raise ValueError(
                f"zipf_exponent must be a number >= 0, got {exponent!r}."
            )
        return {
            table.name: expected_usage(
                table,
                [f for _, f in features[table.name]],
                [hotness[i] for i, _ in features[table.name]],
                size,
                float(exponent),
                replicas,
            )
            for table in spec.tables
        }
    if batch_size is not None:
        raise ValueError(
            f"batch_size={batch_size!r} is for a hotness: batches have their "
            "own, the samples of all replicas."
        )
    read = _batches(spec, given)
    return {
        table.name: measured_usage(
            table,
            [f for _, f in features[table.name]],
            [[bags[i] for i, _ in features[table.name]] for bags in read],
            replicas,
        )
        for table in spec.tables
    }


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _hotness(spec: EmbeddingSpec, given: Any) -> list[float] | None:
    """Each feature's hotness; None: something else is given."""
    if _is_number(given):
        flat = [given] * len(spec.features)
    elif isinstance(given, Mapping):
        flat = _by_feature(spec, given)
        if not any(map(_is_number, flat)):
            return None  # One batch.
    else:
        return None
    for feature, value in zip(spec.features, flat, strict=True):
        if not _is_number(value):
            raise TypeError(
                f"{feature}: hotness must be a number, as that of other "
                f"features, got {type(value).__name__}."
            )
        if not math.isfinite(value) or value <= 0:
            raise ValueError(
                f"{feature}: hotness must be a number above 0, got {value!r}."
            )
    return [float(value) for value in flat]


def _by_feature(spec: EmbeddingSpec, given: Mapping[Any, Any]) -> list[Any]:
    """A dict's values by features' names, or as the configuration is nested."""
    for names in (
        [f.name for f in spec.features],
        [f.source.name for f in spec.features],
    ):
        if len(set(names)) == len(names) and set(names) == set(given):
            return [given[name] for name in names]
    if not isinstance(spec.structure.template, Mapping):
        raise ValueError(
            f"batches_or_hotness has the keys {list(given)}; the features are "
            f"{[f.name for f in spec.features]}."
        )
    return spec.structure.flatten(given, "batches_or_hotness")


def _batches(spec: EmbeddingSpec, given: Any) -> list[list[batch_readers.Bags]]:
    """For each global batch, each feature's ids."""
    if isinstance(given, Mapping):
        given = [given]
    tensors = (
        np.ndarray,
        tf.Tensor,
        tf.RaggedTensor,
        tf.SparseTensor,
        str,
        bytes,
    )
    if isinstance(given, tensors) or not isinstance(given, Iterable):
        raise TypeError(
            "batches_or_hotness must be a number, a dict with a number for "
            "each feature, or a list or dataset of global batches, got "
            f"{type(given).__name__}."
        )
    read = []
    for number, batch in enumerate(itertools.islice(given, MOST_BATCHES)):
        where = f"batches[{number}]"
        if isinstance(batch, Mapping):
            leaves = _by_feature(spec, batch)
        else:
            leaves = spec.structure.flatten(batch, where)
        read.append(
            [
                batch_readers.read(leaf, feature, where)
                for feature, leaf in zip(spec.features, leaves, strict=True)
            ]
        )
        if not any(bags.samples for bags in read[-1]):
            raise ValueError(f"{where} has no samples.")
    if not read:
        raise ValueError("batches_or_hotness has no batches.")
    return read


def _demand(table: TableSpec, usage: TableUsage, optimizer: Any) -> Demand:
    where = f"Table '{table.name}'"
    own = table.optimizer if table.optimizer is not None else optimizer
    trained_by = conversion.convert(own, where)
    kept, reason = None, ""
    if table.keys is not None:
        kept, reason = "row", f"its keys are {table.keys.dtype.name}"
    elif table.placement != "auto":
        kept = _KEPT.get(table.placement)
        reason = f"placement='{table.placement}'"
        if kept is None:
            raise ValueError(
                f"{where}: {reason} can't be planned; a plan is for replicas "
                "on CPUs and GPUs."
            )
    return Demand(
        name=table.name,
        rows=table.vocabulary_size,
        dim=table.dim,
        slots=len(trained_by.rule.slots()) if trained_by else 0,
        usage=usage,
        kept=kept,
        reason=reason,
    )


def _does_not_fit(search: Search) -> str:
    """Says by how much the tables don't fit, and what would."""
    limit = search.limit
    assert limit is not None
    most = int(search.tightest().prediction.memory.max())
    largest = max(search.demands, key=lambda demand: demand.bytes)
    total = sum(demand.bytes for demand in search.demands)
    message = (
        f"The tables don't fit. With their slots they take "
        f"{_size(total)}, the largest, '{largest.name}', "
        f"{_size(largest.bytes)}; spread over {search.replicas} replicas they "
        f"need {_size(most)} on one of them, {_size(most - limit)} more than "
        f"memory_per_replica={limit} ({format_bytes(limit)}). "
        f"memory_per_replica={most} would do"
    )
    replicas = _enough_replicas(search.demands, limit)
    if replicas is not None:
        return f"{message}, or {replicas:,} replicas, sharded by row."
    return (
        f"{message}; no number of replicas would, as some tables can't be "
        "spread any further."
    )


def _size(size: int) -> str:
    return f"{size} bytes ({format_bytes(size)})"


def _enough_replicas(demands: Sequence[Demand], limit: int) -> int | None:
    """The least number on which tables fit that are sharded by row.

    Those whose placement is kept are as they are.

    Args:
        demands: the tables.
        limit: bytes that a replica may hold.

    Returns:
        The number; None: there is none.
    """

    def needed(replicas: int) -> int:
        total = 0
        for demand in demands:
            spread = demand.kept in (None, "row")
            rows = -(-demand.rows // replicas) if spread else demand.rows
            total += rows * (demand.bytes // demand.rows)
        return total

    low, high = 1, max(demand.rows for demand in demands)
    if needed(high) > limit:
        return None
    while low < high:
        middle = (low + high) // 2
        if needed(middle) <= limit:
            high = middle
        else:
            low = middle + 1
    return low


def _plan(
    search: Search,
    found: Found,
    others: Mapping[str, Found],
    spec: EmbeddingSpec,
    samples: float,
) -> Plan:
    """Describes what was found, and other choices by their names."""
    different: dict[str, Found] = {}
    seen = {found.choice}
    for name, each in others.items():
        if each.choice not in seen:
            seen.add(each.choice)
            different[name] = each
    prediction = found.prediction
    sent = prediction.exchange.bytes
    features: dict[str, list[FeatureSpec]] = {}
    for feature in spec.features:
        features.setdefault(feature.table.name, []).append(feature)
    return Plan(
        replicas=search.replicas,
        hardware=search.hardware,
        memory_per_replica=search.limit,
        batch_size=samples,
        tables=tuple(
            TablePlan(
                table=demand.name,
                rows=demand.rows,
                dim=demand.dim,
                bytes=demand.bytes,
                features=tuple(f.name for f in features[demand.name]),
                hotness=demand.usage.hotness,
                unique_share=demand.usage.unique_share,
                placement=place.placement,  # type: ignore[arg-type]
                ranks=place.ranks,
                reason=_reason(search, found, i),
            )
            for i, (demand, place) in enumerate(
                zip(search.demands, found.places, strict=True)
            )
        ),
        per_replica=tuple(
            ReplicaPlan(rank, int(size), sent, float(lookups))
            for rank, (size, lookups) in enumerate(
                zip(prediction.memory, prediction.lookups, strict=True)
            )
        ),
        seconds=prediction.time.seconds,
        sent_bytes=sent,
        collectives=prediction.exchange.collectives,
        imbalance=prediction.imbalance,
        alternatives=tuple(
            PlanAlternative(
                name=name,
                seconds=each.prediction.time.seconds,
                sent_bytes=each.prediction.exchange.bytes,
                bytes=int(each.prediction.memory.max()),
                fits=search.fits(each),
            )
            for name, each in different.items()
        ),
    )


def _reason(search: Search, found: Found, index: int) -> str:
    """Why a table is where it is: what other places would cost."""
    demand = search.demands[index]
    if demand.kept is not None:
        return demand.reason
    if search.replicas == 1:
        return "one replica"
    mine = found.choice[index]
    nearest: tuple[float, str] | None = None
    unfit = []
    for placement in PLACEMENTS:
        options = [
            search.evaluate(
                (*found.choice[:index], c, *found.choice[index + 1 :])
            )
            for c in search.options[index]
            if c.placement == placement != mine.placement
        ]
        if not options:
            continue
        other = min(options, key=lambda each: each.key)
        if other.excess:
            unfit.append(placement)
            continue
        more = other.prediction.time.seconds - found.prediction.time.seconds
        each = max(more, 0.0), _name(other.choice[index])
        nearest = each if nearest is None else min(nearest, each)
    parts = []
    if nearest is not None:
        parts.append(f"{nearest[1]} takes {format_seconds(nearest[0])} more")
    if unfit:
        doesnt = "doesn't" if len(unfit) == 1 else "don't"
        parts.append(f"{', '.join(unfit)} {doesnt} fit")
    return "; ".join(parts)


def _name(candidate: Candidate) -> str:
    if candidate.placement == "column":
        return f"column over {candidate.slices}"
    return candidate.placement


def _alternatives(search: Search) -> dict[str, Found]:
    """Other choices: all tables in one placement, and the best without each.

    Those that don't fit are what would be best if they did.
    """
    unlimited = Search(search.demands, search.hardware, None)
    allowed = {f"all {name}": [name] for name in PLACEMENTS}
    for name in PLACEMENTS:
        allowed[f"without {name}"] = [p for p in PLACEMENTS if p != name]
    found = {name: search.best(each) for name, each in allowed.items()}
    return {
        name: unlimited.best(allowed[name]) if each.excess else each
        for name, each in found.items()
    }
