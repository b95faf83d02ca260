"""Configurations with the placements of a plan."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.strategies import is_tpu
from tfrs_embed.configs.plan import Plan, TablePlan
from tfrs_embed.configs.tables import EmbeddingSpec, TableSpec, bytes_of
from tfrs_embed.optimizers import conversion
from tfrs_embed.optimizers.rules import TableOptimizer, UpdateRule


def trained_by(table: TableSpec, optimizer: Any) -> UpdateRule | None:
    """Returns the update rule of a table: its own, or that of all tables.

    Args:
        table: the table.
        optimizer: the optimizer of tables that have none of their own, in any
            form that layers take; None: such tables have none.
    """
    found = _optimizer(table, optimizer)
    return None if found is None else found.rule


def whole_rows(table: TableSpec, optimizer: Any) -> str | None:
    """Returns what of a table's optimizer needs whole rows; None: nothing.

    Args:
        table: the table.
        optimizer: see `trained_by`.
    """
    found = _optimizer(table, optimizer)
    return None if found is None else found.needs_whole_rows


def _optimizer(table: TableSpec, optimizer: Any) -> TableOptimizer | None:
    own = table.optimizer if table.optimizer is not None else optimizer
    return conversion.convert(own, f"Table '{table.name}'")


def rule_name(rule: UpdateRule | None) -> str:
    """Returns an update rule's name in plans; "none" of None."""
    return "none" if rule is None else rule.name


def with_plan(
    spec: EmbeddingSpec,
    plan: Any,
    strategy: tf.distribute.Strategy,
    optimizer: Any,
) -> EmbeddingSpec:
    """Puts a plan's placements into a configuration.

    On one replica, as on a laptop, a plan for any number is taken, and says
    nothing. Tables whose optimizer, dtype or features differ from the plan's
    are placed as it says, with a warning: its times and bytes are not theirs.

    Args:
        spec: the configuration.
        plan: a `Plan`; None: it stays as it is.
        strategy: the strategy that the tables are made under.
        optimizer: of the tables that have none of their own.

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
    _warn_of_changes(spec, plan, optimizer)
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


def _warn_of_changes(spec: EmbeddingSpec, plan: Plan, optimizer: Any) -> None:
    """Warns of tables that the plan's predictions are not for."""
    planned = {table.table: table for table in plan.tables}
    changes = []
    for table in spec.tables:
        was, where = planned[table.name], f"Table '{table.name}'"
        rule = trained_by(table, optimizer)
        for what, before, now in (
            ("optimizer", was.optimizer, rule_name(rule)),
            ("dtype", was.dtype, table.dtype),
        ):
            if before not in (None, now):
                changes.append(f"{where}: {what} {now}, planned for {before}.")
        slots = rule.numbers_per_row(table.dim) if rule else 0
        size = table.vocabulary_size * (table.dim * bytes_of(table) + 4 * slots)
        if size != was.bytes:
            changes.append(
                f"{where}: {size:,} bytes with slots, planned {was.bytes:,}."
            )
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
