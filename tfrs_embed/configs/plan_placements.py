"""Puts the placements of a plan into a configuration."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.strategies import is_tpu
from tfrs_embed.configs.plan import Plan, TablePlan
from tfrs_embed.configs.tables import EmbeddingSpec, TableSpec
from tfrs_embed.optimizers import conversion
from tfrs_embed.optimizers.rules import TableOptimizer


def table_optimizer(table: TableSpec, optimizer: Any) -> TableOptimizer | None:
    """Returns a table's optimizer: its own, else `optimizer` (any form)."""
    own = table.optimizer if table.optimizer is not None else optimizer
    return conversion.convert(own, f"Table '{table.name}'")


def rule_name(optimizer: TableOptimizer | None) -> str:
    """Returns the name of an optimizer's rule in plans; "none" of None."""
    return "none" if optimizer is None else optimizer.rule.name


def with_plan(
    spec: EmbeddingSpec,
    plan: Any,
    strategy: tf.distribute.Strategy,
    optimizer: Any,
) -> EmbeddingSpec:
    """Returns the configuration with a plan's placements, ranks and hot rows.

    On one replica a plan for any number of replicas is accepted and ignored. If
    tables' optimizers, dtypes or features differ from the plan's, a warning
    says that the plan's times and bytes are for other tables.

    Args:
        spec: the configuration.
        plan: a `Plan`; None: the configuration is returned.
        strategy: the strategy that the tables are made under.
        optimizer: the optimizer of tables that have none of their own.

    Raises:
        TypeError: `plan` is no plan.
        ValueError: the plan is for other tables or another number of replicas;
            the strategy is of TPUs; or, without a plan, a table's `hot_rows` is
            a number.
    """
    if plan is None:
        _require_hot_rows(spec)
        return spec
    if not isinstance(plan, Plan):
        raise TypeError(
            "plan must be what tfrs_embed.plan returns, or None, got "
            f"{type(plan).__name__}. Plan.from_json reads one that was stored."
        )
    if is_tpu(strategy):
        raise ValueError(
            "plan is for replicas on CPUs and GPUs; on TPUs leave it out."
        )
    planned = {table.table: table for table in plan.tables}
    _check_tables(spec, planned)
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return spec
    if plan.replicas != replicas:
        raise ValueError(
            f"The plan is for {plan.replicas} replicas, and the strategy has "
            f"{replicas}."
        )
    _warn_of_changes(spec, planned, optimizer)
    tables = {}
    for table in spec.tables:
        place = planned[table.name]
        tables[table] = dataclasses.replace(
            table,
            placement=place.placement,
            ranks=place.ranks,
            hot_rows=place.hot_rows,
        )
    return dataclasses.replace(
        spec,
        tables=tuple(tables.values()),
        features=tuple(
            dataclasses.replace(f, table=tables[f.table]) for f in spec.features
        ),
    )


def _require_hot_rows(spec: EmbeddingSpec) -> None:
    for table in spec.tables:
        if isinstance(table.hot_rows, int):
            raise ValueError(
                f"Table '{table.name}': hot_rows={table.hot_rows} is a number "
                "of rows, but a layer needs the rows' ids. Give ids that "
                "tfrs_embed.hot_rows(feature_config, batches) finds; or give "
                "the layer a plan that tfrs_embed.plan made from batches."
            )


def _check_tables(
    spec: EmbeddingSpec, planned: Mapping[str, TablePlan]
) -> None:
    here = {table.name for table in spec.tables}
    for problem, names in (
        ("has no", here - set(planned)),
        ("has another", set(planned) - here),
    ):
        if names:
            raise ValueError(
                f"The plan is for other tables: it {problem} table "
                f"'{min(names)}'."
            )
    for table in spec.tables:
        other = planned[table.name]
        if (table.num_rows, table.dim) != (other.rows, other.dim):
            raise ValueError(
                f"Table '{table.name}' has {table.num_rows} rows x "
                f"{table.dim}, and in the plan {other.rows} x {other.dim}."
            )
        if table.keys is not None and str(other) != "row":
            raise ValueError(
                f"Table '{table.name}' has keys, whose rows are always spread "
                f"by key, without hot rows, and in the plan is placed by "
                f"'{other}'."
            )


def _warn_of_changes(
    spec: EmbeddingSpec, planned: Mapping[str, TablePlan], optimizer: Any
) -> None:
    """Warns of tables that differ from those that were planned."""
    changes = []
    for table in spec.tables:
        was, where = planned[table.name], f"Table '{table.name}'"
        own = table_optimizer(table, optimizer)
        for what, before, now in (
            ("optimizer", was.optimizer, rule_name(own)),
            ("dtype", was.dtype, table.dtype),
            ("in_files", was.in_files, table.storage is not None),
        ):
            if before != now:
                changes.append(f"{where}: {what} {now}, planned for {before}.")
        features = {f.name for f in spec.features if f.table is table}
        if features != set(was.features):
            changes.append(
                f"{where}: features {sorted(features)}, planned for "
                f"{sorted(was.features)}."
            )
    if changes:
        warnings.warn(
            "The plan's placements are used, but its times and bytes are for "
            f"other tables: {' '.join(changes)} Make another plan with "
            "tfrs_embed.plan, with the layer's optimizer and features.",
            stacklevel=4,
        )
