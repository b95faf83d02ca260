"""Plans a configuration: checks arguments, searches, gives reasons."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Any

from tfrs_embed.compat.arguments import integer
from tfrs_embed.compat.text_table import format_bytes
from tfrs_embed.configs.hardware import Hardware, hardware
from tfrs_embed.configs.parsing import parse
from tfrs_embed.configs.plan import (
    PLACEMENTS,
    Plan,
    ReplicaPlan,
    TablePlan,
    format_seconds,
)
from tfrs_embed.configs.plan_placements import rule_name, table_optimizer
from tfrs_embed.configs.tables import EmbeddingSpec, TableSpec, bytes_of
from tfrs_embed.distribution import wire
from tfrs_embed.distribution.exchange_kind import ELEMENT_SIZES
from tfrs_embed.engines import column_slices
from tfrs_embed.optimizers.rules import TableOptimizer
from tfrs_embed.tools.planner.candidates import Candidate, Demand
from tfrs_embed.tools.planner.inputs import table_usage
from tfrs_embed.tools.planner.prediction import CostModel, Step
from tfrs_embed.tools.planner.search import best_step
from tfrs_embed.tools.planner.usage import TableUsage

#: The exponent of the ids in docs/scaling.md.
ZIPF_EXPONENT = 1.05

# Configurations' placements by the names that plans have.
_KEPT = {name: name for name in PLACEMENTS}
_KEPT |= {"sharded": "row", "default_device": "replicated"}


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
    communication_dtype: Any = "float32",
    progress: bool = True,
) -> Plan:
    """Plans the placements with the least predicted step time that fit.

    Nothing is built: a plan is arithmetic on the tables' sizes and use.
    docs/planning.md describes the model and its limits.

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
        [('users', 'row'), ('countries', 'row')]

    Args:
        feature_config: a `FeatureConfig`, or a nesting of them, as for layers.
            A table with a `placement` other than "auto", or with `keys`, is
            counted and keeps its placement. A table's `hot_rows` are copied
            where a plan predicts that this is faster, or where the table's
            placement is "row". If `hot_rows` is a number, the most frequent ids
            of the batches are taken. Tables with a `FileStorage` take no
            memory, and no time for the disk.
        batches_or_hotness: the use of tables. Either a hotness, the number of
            ids of a sample: one number for all features, or a dict with a
            number for each feature, by name or nested as the configuration. Or
            a list or dataset of global batches, of which at most 32 are read:
            each is nested as the configuration, and its leaves are arrays,
            tensors (dense, ragged or sparse), lists of ids, or lists of
            samples' lists of ids.
        replicas: the number of replicas; None: the replicas of one host.
        memory_per_replica: bytes that a replica has for tables and their slots;
            None: all memory of the hardware.
        topology: the hardware: accelerators of a host, such as "8xA100" or
            "4xH100"; "cpu" for processes of one machine; or a `Hardware`.
        optimizer: the optimizer of tables without their own, in any form that
            layers take. It decides how many slots tables have. None: tables
            without an optimizer have no slots.
        batch_size: samples of one replica; only with a hotness.
        zipf_exponent: with a hotness, the exponent of the ids' Zipf law: the
            frequency of the i-th most frequent id is proportional to
            1 / i ** exponent. 0: all ids of a table are equally frequent.
        communication_dtype: the dtype that a layer with this plan sends rows,
            vectors and gradients as: "float32", "bfloat16" or "float16".
        progress: whether to show how many batches were read, as
            `tfrs_embed.progress.set_mode` says.

    Returns:
        The plan.

    Raises:
        ValueError: the tables don't fit (the error says what would); or a
            value is out of its range, names no feature, or contradicts another.
        TypeError: a value is of the wrong kind.
    """
    spec = parse(feature_config)
    machine = hardware(topology)
    for table in spec.tables:
        if table.storage is not None and not machine.shared:
            raise ValueError(
                f"Table '{table.name}' has a FileStorage, which needs CPUs: "
                f"topology '{machine.name}' must be 'cpu', such as '1xcpu', or "
                "a Hardware with shared=True."
            )
    if replicas is None:
        if machine.replicas_per_host is None:
            raise ValueError(
                f"replicas must be given: the topology '{machine.name}' has "
                "any number."
            )
        replicas = machine.replicas_per_host
    count = integer(replicas, "replicas")
    limit = machine.memory
    if memory_per_replica is not None:
        limit = integer(memory_per_replica, "memory_per_replica")
    usage = table_usage(
        spec, batches_or_hotness, count, batch_size, zipf_exponent, progress
    )
    sent_as = wire.communication_dtype(communication_dtype)
    optimizers = {t.name: table_optimizer(t, optimizer) for t in spec.tables}
    demands = [
        _demand(t, usage[t.name], optimizers[t.name], ELEMENT_SIZES[sent_as])
        for t in spec.tables
    ]
    model = CostModel(demands, machine, limit)
    best = best_step(model)
    if best.excess:
        by_row = model.step(
            options.get(Candidate("row"), min(options.values()))
            for options in model.options
        )
        raise _does_not_fit(model, min(best.most, by_row.most))
    samples = max(f.samples for u in usage.values() for f in u.features)
    return _plan(model, best, spec, optimizers, samples, sent_as)


def _demand(
    table: TableSpec,
    usage: TableUsage,
    optimizer: TableOptimizer | None,
    element: int,
) -> Demand:
    where = f"Table '{table.name}'"
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
    uncut = None if optimizer is None else optimizer.needs_whole_rows
    if kept == "column":
        world = len(usage.owned)
        slices = column_slices.most_slices(table.dim, world)
        column_slices.require_uncut(table, slices, uncut)
    slots = optimizer.rule.numbers_per_row(table.dim) if optimizer else 0
    return Demand(
        name=table.name,
        rows=table.num_rows,
        dim=table.dim,
        slot_numbers=slots,
        usage=usage,
        kept=kept,
        reason=reason,
        keyed=table.keys is not None,
        element=element,
        uncut=uncut is not None,
        number=bytes_of(table),
        in_files=table.storage is not None,
    )


def _plan(
    model: CostModel,
    step: Step,
    spec: EmbeddingSpec,
    optimizers: Mapping[str, TableOptimizer | None],
    samples: float,
    sent_as: str,
) -> Plan:
    """Makes the plan of a choice."""
    sent = step.exchange.bytes
    return Plan(
        replicas=model.replicas,
        hardware=model.hardware,
        memory_per_replica=model.limit,
        batch_size=samples,
        tables=tuple(
            _table_plan(model, step, i, spec, optimizers[table.name])
            for i, table in enumerate(spec.tables)
        ),
        per_replica=tuple(
            ReplicaPlan(rank, int(size), sent, float(lookups))
            for rank, (size, lookups) in enumerate(
                zip(step.memory, step.lookups, strict=True)
            )
        ),
        seconds=step.seconds,
        sent_bytes=sent,
        collectives=step.exchange.collectives,
        imbalance=step.imbalance,
        communication_dtype=sent_as,  # type: ignore[arg-type]
    )


def _table_plan(
    model: CostModel,
    step: Step,
    index: int,
    spec: EmbeddingSpec,
    optimizer: TableOptimizer | None,
) -> TablePlan:
    table, demand = spec.tables[index], model.demands[index]
    candidate = model.candidates[step.choice[index]]
    hot = demand.usage.hot if candidate.hot else None
    return TablePlan(
        table=table.name,
        rows=demand.rows,
        dim=demand.dim,
        bytes=demand.rows * demand.state_bytes,
        features=tuple(f.name for f in spec.features if f.table is table),
        hotness=demand.usage.hotness,
        unique_share=demand.usage.unique_share,
        placement=candidate.placement,  # type: ignore[arg-type]
        ranks=step.ranks.get(index, ()),
        reason=_reason(model, step, index),
        hot_rows=tuple(sorted(hot.ids)) if hot else (),
        optimizer=rule_name(optimizer),
        dtype=table.dtype,
        in_files=demand.in_files,
    )


def _reason(model: CostModel, step: Step, index: int) -> str:
    """The reason for a table's placement: the cost of other placements."""
    demand = model.demands[index]
    if demand.kept is not None:
        return demand.reason
    if model.replicas == 1:
        return "one replica"
    mine = model.candidates[step.choice[index]]
    best: dict[str, tuple[Candidate, Step]] = {}
    for each, option in model.options[index].items():
        if (each.placement, each.hot) != (mine.placement, mine.hot):
            choice = (*step.choice[:index], option, *step.choice[index + 1 :])
            kind = "row with hot rows" if each.hot else each.placement
            other = model.step(choice)
            if kind not in best or other.key < best[kind][1].key:
                best[kind] = each, other
    parts = []
    if fitting := [pair for pair in best.values() if not pair[1].excess]:
        nearest, other = min(fitting, key=lambda pair: pair[1].key)
        more = format_seconds(max(other.seconds - step.seconds, 0.0))
        parts.append(f"{nearest} takes {more} more")
    if unfit := [kind for kind, (_, each) in best.items() if each.excess]:
        doesnt = "doesn't" if len(unfit) == 1 else "don't"
        parts.append(f"{', '.join(unfit)} {doesnt} fit")
    return "; ".join(parts)


def _does_not_fit(model: CostModel, most: int) -> ValueError:
    """Returns the error of a search that found nothing that fits."""
    limit, demands = model.limit, model.demands
    assert limit is not None
    largest = max(demands, key=lambda demand: demand.bytes)
    message = (
        "The tables don't fit. With their slots they take "
        f"{_size(sum(demand.bytes for demand in demands))}, the largest, "
        f"'{largest.name}', {_size(largest.bytes)}; spread over "
        f"{model.replicas} replicas they need {_size(most)} on one of them, "
        f"{_size(most - limit)} more than memory_per_replica={limit} "
        f"({format_bytes(limit)}). memory_per_replica={most} would do"
    )

    def needed(replicas: int) -> int:
        """Bytes on each of some replicas, of tables by row where allowed."""
        total = 0
        for demand in demands:
            spread = demand.kept in (None, "row")
            rows = -(-demand.rows // replicas) if spread else demand.rows
            total += rows * (demand.bytes // demand.rows)
            total += demand.hot_bytes * (demand.kept == "row")
        return total

    numbers = range(1, max(demand.rows for demand in demands) + 1)
    index = bisect.bisect_left(numbers, True, key=lambda n: needed(n) <= limit)
    if index < len(numbers):
        enough = f", or {numbers[index]:,} replicas, sharded by row."
    else:
        enough = (
            "; no number of replicas would, as some tables can't be spread any "
            "further."
        )
    return ValueError(message + enough)


def _size(size: int) -> str:
    return f"{size} bytes ({format_bytes(size)})"
