"""Reads the use of tables from a hotness or from batches."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Mapping
from typing import Any

from tfrs_embed.compat import progress as tasks
from tfrs_embed.compat.arguments import integer, number
from tfrs_embed.configs import hashing as hashings
from tfrs_embed.configs.tables import EmbeddingSpec, FeatureSpec, TableSpec
from tfrs_embed.tools.planner.batches import (
    by_feature,
    count_hot_rows,
    read_batches,
)
from tfrs_embed.tools.planner.usage import (
    TableUsage,
    expected_usage,
    measured_usage,
)

#: A plan reads no more batches.
MOST_BATCHES = 32


def table_usage(
    spec: EmbeddingSpec,
    given: Any,
    replicas: int,
    batch_size: int | None,
    exponent: float,
    progress: bool = True,
) -> dict[str, TableUsage]:
    """Returns each table's use, given a hotness or batches.

    The other arguments, and the errors, are those of `planning.plan`.
    """
    hotness = _hotness(spec, given)
    if hotness is not None:
        return _expected(spec, hotness, replicas, batch_size, exponent)
    if batch_size is not None:
        raise ValueError(
            f"batch_size={batch_size!r} is for a hotness: batches have their "
            "own, the samples of all replicas."
        )
    limited = itertools.islice(read_batches(spec, given), MOST_BATCHES)
    size = tasks.size_of(given)
    total = MOST_BATCHES if size is None else min(size, MOST_BATCHES)
    with tasks.Task(
        "Reading", "batches for a plan", total, "batches", show=progress
    ) as task:
        read = list(task.count(limited))
    counted = count_hot_rows(spec, read)
    return {
        table.name: measured_usage(
            table,
            [
                [
                    bags[lookup]
                    for feature in _features(spec, table)
                    for lookup in feature.lookups
                ]
                for bags in read
            ],
            replicas,
            counted.get(table.name, table.hot_rows),  # type: ignore[arg-type]
        )
        for table in spec.tables
    }


def _features(spec: EmbeddingSpec, table: TableSpec) -> list[FeatureSpec]:
    return [feature for feature in spec.features if feature.table is table]


def _expected(
    spec: EmbeddingSpec,
    hotness: Mapping[FeatureSpec, float],
    replicas: int,
    batch_size: int | None,
    exponent: float,
) -> dict[str, TableUsage]:
    """Each table's use from a hotness; checks the other arguments."""
    if batch_size is None:
        raise ValueError(
            "batch_size must be given with a hotness: the samples of one "
            "replica."
        )
    size = integer(batch_size, "batch_size")
    exponent = number(exponent, "zipf_exponent", positive=False)
    usage = {}
    for table in spec.tables:
        if isinstance(table.hot_rows, int):
            raise ValueError(
                f"Table '{table.name}': hot_rows={table.hot_rows} is a number "
                "of rows, and a hotness doesn't tell which rows: give batches, "
                "or the rows' ids."
            )
        lookups = []
        for feature in _features(spec, table):
            ids = hotness[feature]
            for lookup in feature.lookups:
                if hashings.multiplies(feature.hashing):
                    # Each id has a vector.
                    shape = None, math.ceil(ids)
                    lookup = dataclasses.replace(lookup, output_shape=shape)
                lookups.append((lookup, ids))
        usage[table.name] = expected_usage(
            table, lookups, size, exponent, replicas, table.hot_rows
        )
    return usage


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _hotness(
    spec: EmbeddingSpec, given: Any
) -> dict[FeatureSpec, float] | None:
    """Each feature's hotness; None: batches are given."""
    if _is_number(given):
        flat = [given] * len(spec.features)
    elif isinstance(given, Mapping):
        flat = by_feature(spec, given, "batches_or_hotness")
        if not any(map(_is_number, flat)):
            return None  # One batch.
    else:
        return None
    return {
        feature: number(value, f"{feature}: hotness")
        for feature, value in zip(spec.features, flat, strict=True)
    }
