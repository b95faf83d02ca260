"""Configurations with the placements of a plan."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf

from tfrs_embed.configs import EmbeddingSpec, TableSpec
from tfrs_embed.planner.plans import Plan, TablePlan
from tfrs_embed.strategies import is_tpu


def with_plan(
    spec: EmbeddingSpec, plan: Any, strategy: tf.distribute.Strategy
) -> EmbeddingSpec:
    """Puts a plan's placements into a configuration.

    On one replica, as on a laptop, a plan for any number is taken, and says
    nothing.

    Args:
        spec: the configuration.
        plan: a `Plan`; None: it stays as it is.
        strategy: the strategy that the tables are made under.

    Returns:
        The configuration, whose tables have the plan's placements, ranks and
        hot rows.

    Raises:
        TypeError: it is no plan.
        ValueError: it is one for other tables or another number of replicas, or
            the strategy is one of TPUs. Without a plan, a table says how many
            hot rows it wants, and not which.
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
    _check_tables(spec, plan)
    replicas = strategy.num_replicas_in_sync
    if replicas == 1:
        return spec
    if plan.replicas != replicas:
        raise ValueError(
            f"The plan is for {plan.replicas} replicas, and the strategy has "
            f"{replicas}."
        )
    planned = {table.table: table for table in plan.tables}
    tables = {t: _placed(t, planned[t.name]) for t in spec.tables}
    return dataclasses.replace(
        spec,
        tables=tuple(tables.values()),
        features=tuple(
            dataclasses.replace(f, table=tables[f.table]) for f in spec.features
        ),
    )


def _placed(table: TableSpec, planned: TablePlan) -> TableSpec:
    return dataclasses.replace(
        table,
        placement=planned.placement,
        ranks=planned.ranks,
        hot_rows=planned.hot_rows,
    )


def _require_hot_rows(spec: EmbeddingSpec) -> None:
    for table in spec.tables:
        if isinstance(table.hot_rows, int):
            raise ValueError(
                f"Table '{table.name}': hot_rows={table.hot_rows} says how "
                "many rows to copy, and not which. Give their ids, which "
                "tfrs_embed.hot_rows(feature_config, batches) counts; or give "
                "the layer a plan that tfrs_embed.plan made of batches."
            )


def _check_tables(spec: EmbeddingSpec, plan: Plan) -> None:
    planned = {table.table: table for table in plan.tables}
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
        if (table.vocabulary_size, table.dim) != (other.rows, other.dim):
            raise ValueError(
                f"Table '{table.name}' has {table.vocabulary_size} rows x "
                f"{table.dim}, and in the plan {other.rows} x {other.dim}."
            )
        if table.keys is not None and other.hot_rows:
            raise ValueError(
                f"Table '{table.name}' has keys, and in the plan hot rows, "
                "which tables with keys can't have."
            )
        if table.keys is not None and other.placement != "row":
            raise ValueError(
                f"Table '{table.name}' has keys, whose rows are always spread "
                f"by key, and in the plan is placed by '{other.placement}'."
            )
