"""The lookups of batches in tables, counted without looking them up."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.storage.dynamic_table import DynamicTable
from tfrs_embed.storage.mapped_files import pages_in_memory
from tfrs_embed.tools.monitoring.reports import LookupReport, top_shares
from tfrs_embed.tools.planner.batches import read_batches
from tfrs_embed.tools.planner.inputs import MOST_BATCHES


def lookup_statistics(layer: Any, batches: Any) -> dict[str, LookupReport]:
    """Counts the lookups of batches in a layer's tables.

    Ids out of range are counted, without an error.

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
        The counts by the tables' names.

    Raises:
        ValueError: a batch doesn't fit the layer's features.
        TypeError: ids are of a wrong kind.
    """
    every = read_batches(layer._spec, batches, "batches", in_range=False)
    read = list(itertools.islice(every, MOST_BATCHES))
    found = {}
    for table in layer._spec.tables:
        ids = [
            np.concatenate(
                [b.values for f, b in bags.items() if f.table is table]
            )
            for bags in read
        ]
        found[table.name] = _count(table, layer.tables[table.name], ids)
    return found


def _count(
    table: TableSpec, state: Any, batches: Sequence[np.ndarray]
) -> LookupReport:
    every = np.concatenate(batches)
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
    top = top_shares(counts[valid], rows)
    shares = [len(np.unique(ids)) / len(ids) for ids in batches if len(ids)]
    pages = here = 0
    if table.storage is not None:
        found = [pages_in_memory(state, np.unique(ids)) for ids in batches]
        pages, here = map(sum, zip(*found, strict=True))
    return LookupReport(
        ids=statistics.fmean(len(ids) for ids in batches),
        unique_share=statistics.fmean(shares) if shares else 1.0,
        invalid_share=float(counts[~valid].sum() / max(every.size, 1)),
        top_share=top.get(0.01, 0.0),
        top_shares=top,
        in_memory_share=here / pages if pages else None,
    )
