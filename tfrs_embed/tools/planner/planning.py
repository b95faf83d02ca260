"""Plans a configuration: checks arguments, searches, gives reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tfrs_embed.compat.arguments import integer
from tfrs_embed.configs import tables as configs
from tfrs_embed.configs.hardware import Hardware, hardware
from tfrs_embed.configs.plan import (
    PLACEMENTS,
    Plan,
    PlanAlternative,
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
from tfrs_embed.tools.planner.candidates import Demand
from tfrs_embed.tools.planner.inputs import table_usage
from tfrs_embed.tools.planner.search import Found, Search, best_of
from tfrs_embed.tools.planner.shortage import does_not_fit
from tfrs_embed.tools.planner.usage import TableUsage, zipf_unique

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
            of the batches are taken. Pages of tables with a `FileStorage` have
            the memory that other tables leave.
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
        zipf_exponent: with a hotness, and for tables in files, the exponent of
            the ids' Zipf law: the frequency of the i-th most frequent id is
            proportional to 1 / i ** exponent. 0: all ids of a table are equally
            frequent.
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
    spec = configs.parse(feature_config)
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
    if limit is not None:
        demands = _with_misses(demands, count * limit, zipf_exponent)
    search = Search(demands, machine, limit)
    found = search.move_owners(search.best())
    if found.excess:
        raise does_not_fit(search, found)
    others = _alternatives(search)
    fitting = filter(search.fits, others.values())
    found = best_of([found, *fitting])
    samples = max(f.samples for u in usage.values() for f in u.features)
    return _plan(search, found, others, spec, optimizers, samples, sent_as)


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
        rows=table.vocabulary_size,
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


def _with_misses(
    demands: Sequence[Demand], memory: int, exponent: float
) -> list[Demand]:
    """Adds the ids that miss, if files have what tables leave of the memory.

    The same share of each table's rows, the most frequent ones, is in memory.
    `memory` is that of all replicas.
    """
    left = max(0, memory - sum(each.bytes for each in demands))
    files = sum(d.rows * d.state_bytes for d in demands if d.in_files)

    def misses(demand: Demand) -> float:
        if not demand.in_files or left >= files:
            return 0.0
        rows, ids = demand.rows, demand.usage.ids
        every, _ = zipf_unique(rows, exponent, ids)
        here, _ = zipf_unique(rows, exponent, ids, rows * left // files)
        return 1.0 - here / every if every else 0.0

    return [dataclasses.replace(d, misses=misses(d)) for d in demands]


def _file_bytes(found: Found) -> list[int]:
    """The files' bytes of each replica."""
    search = found.search
    sizes = [0] * search.replicas
    for i, demand in enumerate(search.demands):
        if demand.in_files:
            ranks = found.ranks.get(i) or range(search.replicas)
            copied = found.candidates[i].placement == "replicated"
            parts = 1 if copied else len(ranks)
            for rank in ranks:
                sizes[rank] += -(-demand.rows * demand.state_bytes // parts)
    return sizes


def _plan(
    search: Search,
    found: Found,
    others: Mapping[str, Found],
    spec: EmbeddingSpec,
    optimizers: Mapping[str, TableOptimizer | None],
    samples: float,
    sent_as: str,
) -> Plan:
    """Makes the plan of the found choice and of others, by name."""
    # Each other choice by its first name.
    names = {found.choice: ""}
    for name, each in others.items():
        names.setdefault(each.choice, name)
    prediction = found.prediction
    sent = prediction.exchange.bytes
    tables = []
    for i, (table, demand, candidate) in enumerate(
        zip(spec.tables, search.demands, found.candidates, strict=True)
    ):
        hot = demand.usage.hot if candidate.hot else None
        features = [f.name for f in spec.features if f.table is table]
        tables.append(
            TablePlan(
                table=table.name,
                rows=demand.rows,
                dim=demand.dim,
                bytes=demand.rows * demand.state_bytes,
                features=tuple(features),
                hotness=demand.usage.hotness,
                unique_share=demand.usage.unique_share,
                placement=candidate.placement,  # type: ignore[arg-type]
                ranks=found.ranks.get(i, ()),
                reason=_reason(search, found, i),
                hot_rows=tuple(sorted(hot.ids)) if hot else (),
                optimizer=rule_name(optimizers[table.name]),
                dtype=table.dtype,
                in_files=demand.in_files,
            )
        )
    return Plan(
        replicas=search.replicas,
        hardware=search.hardware,
        memory_per_replica=search.limit,
        batch_size=samples,
        tables=tuple(tables),
        per_replica=tuple(
            ReplicaPlan(rank, int(size), sent, float(lookups), files)
            for rank, (size, lookups, files) in enumerate(
                zip(
                    prediction.memory,
                    prediction.lookups,
                    _file_bytes(found),
                    strict=True,
                )
            )
        ),
        seconds=found.seconds,
        sent_bytes=sent,
        collectives=prediction.exchange.collectives,
        imbalance=prediction.imbalance,
        alternatives=tuple(
            PlanAlternative(
                name,
                each.seconds,
                each.prediction.exchange.bytes,
                each.most,
                search.fits(each),
            )
            for name, each in others.items()
            if names[each.choice] == name
        ),
        communication_dtype=sent_as,  # type: ignore[arg-type]
        disk_seconds=prediction.time.disk,
    )


def _reason(search: Search, found: Found, index: int) -> str:
    """The reason for a table's placement: the cost of other placements."""
    demand = search.demands[index]
    if demand.kept is not None:
        return demand.reason
    if search.replicas == 1:
        return "one replica"
    mine = found.candidates[index]
    others: dict[str, list[Found]] = {}
    for i, each in enumerate(search.options[index]):
        if (each.placement, each.hot) != (mine.placement, mine.hot):
            choice = (*found.choice[:index], i, *found.choice[index + 1 :])
            kind = "row with hot rows" if each.hot else each.placement
            others.setdefault(kind, []).append(search.evaluate(choice))
    best = {kind: best_of(each) for kind, each in others.items()}
    fitting = [each for each in best.values() if not each.excess]
    parts = []
    if fitting:
        nearest = best_of(fitting)
        more = format_seconds(max(nearest.seconds - found.seconds, 0.0))
        parts.append(f"{nearest.candidates[index]} takes {more} more")
    if unfit := [kind for kind, each in best.items() if each.excess]:
        doesnt = "doesn't" if len(unfit) == 1 else "don't"
        parts.append(f"{', '.join(unfit)} {doesnt} fit")
    return "; ".join(parts)


def _alternatives(search: Search) -> dict[str, Found]:
    """The best choices with one placement for all tables, and without each.

    Where none fits, the best one without a limit.
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
