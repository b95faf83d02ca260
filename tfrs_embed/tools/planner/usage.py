"""The use of tables in a training step: numbers of ids and of unique ids.

They are measured on batches; or expected from a hotness, the ids of a sample,
if ids follow a Zipf law: the frequency of a table's i-th most frequent id is
proportional to i ** -exponent.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from tfrs_embed.configs.tables import FeatureSpec, TableSpec
from tfrs_embed.tools.planner.batches import Bags

# So many of the most frequent ids have exact probabilities. The other ids are
# in bins, each longer than the one before by a factor.
_HEAD = 4096
_BIN = 1.01


@dataclasses.dataclass(frozen=True)
class FeatureUsage:
    """The use of a feature in one replica's part of a batch.

    Attributes:
        samples: the mean number of samples.
        ids: the mean number of ids.
        most_bags: the largest number of bags.
        most_ids: the largest number of ids.
        ragged: whether bags differ in the number of their ids.
    """

    samples: float
    ids: float
    most_bags: int
    most_ids: int
    ragged: bool

    @functools.cached_property
    def bag_size(self) -> int | None:
        """The ids of each bag; None: bags differ."""
        bags, ids = self.most_bags, self.most_ids
        return None if self.ragged or not bags or ids % bags else ids // bags


@dataclasses.dataclass(frozen=True, eq=False)
class HotUsage:
    """The use of a table's hot rows in one replica's part of a batch.

    Attributes:
        ids: the rows.
        unique: the mean number of these rows that are looked up.
        owned: `TableUsage.owned` of the other rows.
    """

    ids: tuple[int, ...]
    unique: float
    owned: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class TableUsage:
    """The use of a table in one replica's part of a batch.

    Attributes:
        features: the use of each feature of the table.
        unique: the mean number of unique ids.
        most_unique: the most unique ids of any replica.
        owned: for each rank r the mean number of unique ids that are r modulo
            the number of replicas, [replicas] float64.
        hot: the use of the table's hot rows, if it has some.
    """

    features: tuple[FeatureUsage, ...]
    unique: float
    most_unique: float
    owned: np.ndarray
    hot: HotUsage | None = None

    @functools.cached_property
    def ids(self) -> float:
        """The mean number of ids."""
        return math.fsum(f.ids for f in self.features)

    @functools.cached_property
    def most_bags(self) -> int:
        """The largest number of bags."""
        return sum(f.most_bags for f in self.features)

    @property
    def hotness(self) -> float:
        """The ids of a sample, of all features."""
        return math.fsum(f.ids / f.samples for f in self.features if f.samples)

    @property
    def unique_share(self) -> float:
        """The unique ids over the ids; 1 without ids."""
        return self.unique / self.ids if self.ids else 1.0


def zipf_unique(
    rows: int, exponent: float, draws: float, head: int | None = None
) -> tuple[float, float]:
    """The mean and variance of the number of unique ids among Zipf draws.

    `head`: count only so many of the most frequent ids; None: all.
    """
    p, counts = _zipf_law(rows, exponent)
    with np.errstate(divide="ignore"):
        absent = np.exp(draws * np.log1p(-p))
    if head is not None:
        counts = np.clip(head - (np.cumsum(counts) - counts), 0, counts)
        rows = head
    mean = float((counts * (1.0 - absent)).sum())
    variance = float((counts * absent * (1.0 - absent)).sum())
    # A draw has at least one id, whatever the rounding.
    return min(max(mean, min(draws, 1.0)), float(rows), draws), variance


def _zipf_law(
    rows: int, exponent: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Probabilities of ids, highest first, and how many ids have each."""
    first = np.arange(1, min(rows, _HEAD) + 1, dtype=np.float64)
    weights, counts = first**-exponent, np.ones_like(first)
    if rows > _HEAD:
        bins = math.ceil(math.log(rows / _HEAD) / math.log(_BIN))
        edges = np.unique(np.geomspace(_HEAD, rows, bins + 1).astype(np.int64))
        size = np.diff(edges).astype(np.float64)
        # The sum over (a, b] is nearly the integral from a + 1/2 to b + 1/2.
        ends = np.log(edges + 0.5)
        power = 1.0 - exponent
        integral = (
            np.diff(ends)
            if power == 0
            else np.diff(np.exp(power * ends)) / power
        )
        weights = np.concatenate([weights, integral / size])
        counts = np.concatenate([counts, size])
    return np.minimum(weights / (weights * counts).sum(), 1.0), counts


def expected_usage(
    table: TableSpec,
    lookups: Sequence[tuple[FeatureSpec, float]],
    batch_size: int,
    exponent: float,
    replicas: int,
    hot_rows: tuple[int, ...] = (),
) -> TableUsage:
    """Computes the expected use of a table from its lookups' hotness.

    `batch_size` is the number of samples of one replica. `hot_rows`, rows that
    may have copies, are assumed to be the most frequent ids.
    """
    used = []
    for feature, each in lookups:
        bags, length = batch_size, feature.max_sequence_length
        if length:
            bags, each = batch_size * length, min(each, length)
        elif not feature.combined:
            bags = math.ceil(batch_size * each)
        elif feature.output_shape is not None:
            bags *= math.prod(d or 1 for d in feature.output_shape[1:])
        used.append(
            FeatureUsage(
                samples=float(batch_size),
                ids=batch_size * each,
                most_bags=bags,
                most_ids=math.ceil(batch_size * each),
                ragged=bool(batch_size * each % bags),
            )
        )
    draws = math.fsum(f.ids for f in used)
    unique, variance = zipf_unique(table.vocabulary_size, exponent, draws)
    # In half of the steps no replica has more.
    z = statistics.NormalDist().inv_cdf(0.5 ** (1 / replicas))
    most = min(
        unique + max(z, 0.0) * math.sqrt(variance),
        float(table.vocabulary_size),
        draws,
    )
    # Small tables may have no rows on high ranks.
    rows = table.vocabulary_size // replicas + (
        np.arange(replicas) < table.vocabulary_size % replicas
    )
    share = rows / table.vocabulary_size
    hot = None
    if hot_rows:
        number = len(hot_rows)
        known, _ = zipf_unique(table.vocabulary_size, exponent, draws, number)
        hot = HotUsage(hot_rows, known, max(unique - known, 0.0) * share)
    return TableUsage(tuple(used), unique, most, unique * share, hot)


def measured_usage(
    table: TableSpec,
    batches: Sequence[Sequence[Bags]],
    replicas: int,
    hot_rows: tuple[int, ...] = (),
) -> TableUsage:
    """Measures the use of a table in batches, divided among replicas.

    Each of the global batches has the ids of each of the table's features.
    """
    parts = [
        [bags.part(rank, replicas) for bags in of_features]
        for rank in range(replicas)
        for of_features in batches
    ]
    used = [
        FeatureUsage(
            samples=statistics.fmean(p.samples for p in of_feature),
            ids=statistics.fmean(p.values.size for p in of_feature),
            most_bags=max(p.bags for p in of_feature),
            most_ids=max(p.values.size for p in of_feature),
            ragged=any(p.ragged for p in of_feature),
        )
        for of_feature in zip(*parts, strict=True)
    ]
    owned, cold = np.zeros(replicas), np.zeros(replicas)
    counts, known = [], 0.0
    hot_ids = np.asarray(hot_rows, np.int64)
    for part in parts:
        unique = np.unique(np.concatenate([p.values for p in part]))
        counts.append(unique.size)
        if table.keys is None:
            owners = unique.astype(np.int64) % replicas
            owned += np.bincount(owners, minlength=replicas) / len(parts)
            others = owners[~np.isin(unique, hot_ids)]
            cold += np.bincount(others, minlength=replicas) / len(parts)
            known += (unique.size - others.size) / len(parts)
    mean = statistics.fmean(counts)
    if table.keys is not None:
        owned[:] = mean / replicas  # A hash decides each key's owner.
    hot = HotUsage(hot_rows, known, cold) if hot_rows else None
    return TableUsage(tuple(used), mean, float(max(counts)), owned, hot)
