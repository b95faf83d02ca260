"""What users give for the use of tables: a hotness, or batches."""

from __future__ import annotations

import dataclasses
import itertools
import math
import numbers
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.compat import progress as tasks
from tfrs_embed.compat.arguments import integer
from tfrs_embed.configs import hashing as hashings
from tfrs_embed.configs.tables import EmbeddingSpec, FeatureSpec
from tfrs_embed.tools.planner import batches as batch_readers
from tfrs_embed.tools.planner.counting import count_hot_rows
from tfrs_embed.tools.planner.usage import (
    TableUsage,
    expected_usage,
    measured_usage,
)

#: No more batches than these are read.
MOST_BATCHES = 32


def table_usage(
    spec: EmbeddingSpec,
    given: Any,
    replicas: int,
    batch_size: int | None,
    exponent: float,
    progress: bool = True,
) -> dict[str, TableUsage]:
    """Reads how tables are used.

    Args:
        spec: the configuration.
        given: a hotness, or batches; see `planning.plan`.
        replicas: the number of replicas.
        batch_size: samples of one replica, with a hotness; else None.
        exponent: of the Zipf law that ids follow, with a hotness.
        progress: whether to show how many batches were read.

    Returns:
        Each table's use, by its name.

    Raises:
        ValueError: a value is out of its range, names no feature, or
            contradicts another.
        TypeError: a value is of the wrong kind.
    """
    hotness = _hotness(spec, given)
    # The lookups of each table, and the features that they belong to.
    features = {
        table.name: [
            (i, each)
            for i, f in enumerate(spec.features)
            if f.table is table
            for each in f.lookups
        ]
        for table in spec.tables
    }
    if hotness is not None:
        if batch_size is None:
            raise ValueError(
                "batch_size must be given with a hotness: the samples of one "
                "replica."
            )
        size = integer(batch_size, "batch_size")
        if (
            not _is_number(exponent)
            or not math.isfinite(exponent)
            or exponent < 0
        ):
            raise ValueError(
                f"zipf_exponent must be a number >= 0, got {exponent!r}."
            )
        for table in spec.tables:
            if isinstance(table.hot_rows, int):
                raise ValueError(
                    f"Table '{table.name}': hot_rows={table.hot_rows} says how "
                    "many rows may be copied, and a hotness not which: give "
                    "batches, or the rows' ids."
                )
        return {
            table.name: expected_usage(
                table,
                [
                    _alone(each, hotness[i])
                    if hashings.multiplies(spec.features[i].hashing)
                    else each
                    for i, each in features[table.name]
                ],
                [hotness[i] for i, _ in features[table.name]],
                size,
                float(exponent),
                replicas,
                table.hot_rows,  # type: ignore[arg-type]
            )
            for table in spec.tables
        }
    if batch_size is not None:
        raise ValueError(
            f"batch_size={batch_size!r} is for a hotness: batches have their "
            "own, the samples of all replicas."
        )
    limited = itertools.islice(read_batches(spec, given), MOST_BATCHES)
    there = tasks.size_of(given)
    total = MOST_BATCHES if there is None else min(there, MOST_BATCHES)
    with tasks.Task(
        "Reading", "batches for a plan", total, "batches", show=progress
    ) as task:
        read = list(task.count(limited))
    counted = count_hot_rows(spec, read)
    return {
        table.name: measured_usage(
            table,
            [f for _, f in features[table.name]],
            [[bags[f] for _, f in features[table.name]] for bags in read],
            replicas,
            counted.get(table.name, table.hot_rows),  # type: ignore[arg-type]
        )
        for table in spec.tables
    }


def _alone(lookup: FeatureSpec, hotness: float) -> FeatureSpec:
    """A lookup whose ids each have a vector of their own."""
    return dataclasses.replace(lookup, output_shape=(None, math.ceil(hotness)))


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


def _by_feature(
    spec: EmbeddingSpec,
    given: Mapping[Any, Any],
    what: str = "batches_or_hotness",
) -> list[Any]:
    """A dict's values by features' names, or as the configuration is nested."""
    for names in (
        [f.name for f in spec.features],
        [f.source.name for f in spec.features],
    ):
        if len(set(names)) == len(names) and set(names) == set(given):
            return [given[name] for name in names]
    if not isinstance(spec.structure.template, Mapping):
        raise ValueError(
            f"{what} has the keys {list(given)}; the features are "
            f"{[f.name for f in spec.features]}."
        )
    return spec.structure.flatten(given, what)


def read_batches(
    spec: EmbeddingSpec,
    given: Any,
    what: str = "batches_or_hotness",
    in_range: bool = True,
) -> Iterator[dict[FeatureSpec, batch_readers.Bags]]:
    """Reads global batches, one after the other.

    Args:
        spec: the configuration.
        given: a list or dataset of them, or one.
        what: the argument's name, for error messages.
        in_range: whether ids must be in their tables.

    Yields:
        For each batch, the ids of each lookup.

    Raises:
        ValueError: there are none, or one has no samples or a wrong id.
        TypeError: these are no batches.
    """
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
        hotness = "a number, a dict with a number for each feature, or "
        raise TypeError(
            f"{what} must be {hotness * ('hotness' in what)}a list or dataset "
            f"of global batches, got {type(given).__name__}."
        )
    number = -1
    for number, batch in enumerate(given):
        where = f"batches[{number}]"
        if isinstance(batch, Mapping):
            leaves = _by_feature(spec, batch, what)
        else:
            leaves = spec.structure.flatten(batch, where)
        read = {
            lookup: bags
            for feature, leaf in zip(spec.features, leaves, strict=True)
            for lookup, bags in zip(
                feature.lookups,
                batch_readers.read(leaf, feature, where, in_range),
                strict=True,
            )
        }
        if not any(bags.samples for bags in read.values()):
            raise ValueError(f"{where} has no samples.")
        yield read
    if number < 0:
        raise ValueError(f"{what} has no batches.")
