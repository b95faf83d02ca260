"""What batches ask of tables, counted outside of steps."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.configs.tables import EmbeddingSpec, TableSpec
from tfrs_embed.storage.dynamic import DynamicTable
from tfrs_embed.tools.monitoring.reports import (
    LookupReport,
    top_share,
    top_shares,
)
from tfrs_embed.tools.planner.inputs import MOST_BATCHES, read_batches

__all__ = ["MOST_BATCHES", "count", "lookup_statistics"]


def lookup_statistics(layer: Any, batches: Any) -> dict[str, LookupReport]:
    """Counts what batches ask of a layer's tables.

    Nothing is looked up, so ids out of range are counted and are no error.

    Example:
        >>> movies = tfrs_embed.TableConfig("movies", 20_000, 8)
        >>> layer = tfrs_embed.PartialTPUEmbedding(
        ...     {"movie": tfrs_embed.FeatureConfig("movie", movies)}, "sgd"
        ... )
        >>> batches = [{"movie": np.array([3, 3, 7, 20_000])}]
        >>> found = tfrs_embed.monitoring.lookup_statistics(layer, batches)
        >>> found["movies"].ids, found["movies"].invalid_share
        (4.0, 0.25)

    Args:
        layer: a layer with a configuration of features.
        batches: a list or a dataset of batches of its inputs, without labels;
            the first 32 are read.

    Returns:
        For each table's name what the batches ask of it.

    Raises:
        ValueError: a batch is none of this layer's features.
        TypeError: ids are of a wrong kind.
    """
    return count(layer._spec, layer.tables, batches)


def count(
    spec: EmbeddingSpec, tables: Any, batches: Any
) -> dict[str, LookupReport]:
    """Counts what batches ask of tables; see `lookup_statistics`.

    Args:
        spec: the configuration.
        tables: the tables' states, by name.
        batches: the batches.
    """
    every = read_batches(spec, batches, "batches", in_range=False)
    read = list(itertools.islice(every, MOST_BATCHES))
    found = {}
    for table in spec.tables:
        ids = [
            np.concatenate(
                [b.values for f, b in bags.items() if f.table is table]
            )
            for bags in read
        ]
        found[table.name] = _count(table, tables[table.name], ids)
    return found


def _count(
    table: TableSpec, state: Any, batches: Sequence[np.ndarray]
) -> LookupReport:
    every = np.concatenate(batches)
    # In Python's own order strings of any length are compared.
    unique, counts = np.unique(every, return_counts=True)
    rows = table.vocabulary_size
    if table.keys is None:
        valid = (unique >= 0) & (unique < rows)
    elif isinstance(state, DynamicTable) and state.variables:
        keys = tf.convert_to_tensor(unique.tolist(), table.keys.dtype)
        valid = state.lookup(keys) >= 0
        rows = max(state.size, 1)
    else:
        valid = np.zeros(len(unique), bool)
    shares = [len(np.unique(ids)) / len(ids) for ids in batches if len(ids)]
    return LookupReport(
        ids=statistics.fmean(len(ids) for ids in batches),
        unique_share=statistics.fmean(shares) if shares else 1.0,
        invalid_share=float(counts[~valid].sum() / max(every.size, 1)),
        top_share=top_share(counts[valid], rows),
        top_shares=top_shares(counts[valid], rows),
    )
