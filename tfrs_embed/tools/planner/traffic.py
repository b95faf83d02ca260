"""The collectives of a training step on tables in given places.

The exchanges of `distribution` and `engines` say which collectives they launch
for messages of given sizes. All replicas send messages of the size of the
longest one. This module finds these sizes for given ids; `parts` predicts them.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfrs_embed.distribution import (
    bag_exchange,
    hot_rows,
    row_exchange,
    vector_exchange,
)
from tfrs_embed.distribution.bag_messages import piece_words
from tfrs_embed.distribution.exchange_kind import (
    first_ranks,
    vectors_are_less,
)
from tfrs_embed.distribution.traffic import Collective, Traffic
from tfrs_embed.engines import data_parallel
from tfrs_embed.ops.bag_matrix import BagColumns
from tfrs_embed.ops.bags import is_wide

FLOAT = 4  # Bytes of a number of a row, and of one that is sent unless told.
HALF = 2  # Bytes of a number of a row of bfloat16 or float16.


class Place(NamedTuple):
    """Where a table is.

    Attributes:
        placement: "row", "table", "column" or "replicated".
        ranks: of "table" and "column", the ranks that hold its slices, in the
            order of the columns; else ().
        hot_rows: of "row", the rows that each replica has a copy of.
    """

    placement: str
    ranks: tuple[int, ...] = ()
    hot_rows: Sequence[int] = ()


class FeatureIds(NamedTuple):
    """The ids that one replica looks up of a feature.

    Attributes:
        table: the table's name.
        ids: the ids, [n].
        bags: the number of bags, each of which becomes one vector.
        ragged: whether bags have different numbers of ids.
        weighted: whether the ids have weights.
    """

    table: str
    ids: Any
    bags: int
    ragged: bool = False
    weighted: bool = False


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The collectives of a step, besides the consensus on all features' ids.

    Attributes:
        replicas: the number of replicas.
        messages: the collectives.
    """

    replicas: int
    messages: tuple[Collective, ...]

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes that a replica sends."""
        return sum(each.sent(self.replicas) for each in self.messages)

    @functools.cached_property
    def passed_bytes(self) -> int:
        """Bytes that a replica sends and, in all-gathers, passes on."""
        gathered = sum(m.size for m in self.messages if m.kind == "all_gather")
        return self.bytes + (self.replicas - 2) * gathered

    @functools.cached_property
    def rounds(self) -> int:
        """How many times a replica sends a message to each other replica."""
        rounds = {"max": 0, "all_reduce": 2}  # A ring goes around twice.
        return sum(rounds.get(each.kind, 1) for each in self.messages)

    @property
    def collectives(self) -> int:
        """The number of collectives, with the consensus on ids."""
        return len(self.messages) + (self.replicas > 1)


def bag_size(bags: int, ids: int, ragged: bool) -> int | None:
    """The ids of each of `bags` bags with `ids` ids; None: bags differ."""
    if ragged or not bags or ids % bags:
        return None
    return ids // bags


def words_of_piece(
    bags: int, ids: int, ragged: bool, weighted: bool = False
) -> int:
    """Words of a feature's ids in the message to a slice's owner."""
    return int(piece_words(bags, ids, int(ragged), int(weighted)))


class _Step:
    """A step on given ids; see `exchange_of_ids` for the arguments."""

    def __init__(
        self,
        tables: Mapping[str, tuple[int, int]],
        places: Mapping[str, Place],
        ids: Sequence[Sequence[FeatureIds]],
        element: int,
        narrow: Collection[str],
    ):
        self.tables, self.places, self.ids = tables, places, ids
        self.element, self.world = element, len(ids)
        self.number = {t: HALF if t in narrow else FLOAT for t in tables}
        # The features that are exchanged by vectors: the words of a bag.
        self.by_vectors: dict[int, int] = {}
        for i, of_ranks in enumerate(zip(*ids, strict=True)):
            words = self._words_by_vectors(of_ranks)
            if words is not None:
                self.by_vectors[i] = words
        # For each rank, the unique keys of each table but for these features.
        self.unique = [
            _unique_by_table(
                f for i, f in enumerate(each) if i not in self.by_vectors
            )
            for each in ids
        ]

    def _words_by_vectors(self, ids: Sequence[FeatureIds]) -> int | None:
        """The words of a feature's bags by vectors; None: it goes by rows."""
        table = ids[0].table
        rows, dim = self.tables[table]
        place = self.places[table]
        # A replica may have no bags.
        size = bag_size(
            sum(f.bags for f in ids),
            sum(np.size(f.ids) for f in ids),
            any(f.ragged for f in ids),
        )
        if place.placement != "row" or len(place.hot_rows) or size is None:
            return None
        if is_wide(rows) or not vectors_are_less(
            size, dim, self.world, self.element, self.number[table]
        ):
            return None
        return BagColumns(size, ids[0].weighted).width

    @functools.cached_property
    def rows(self) -> dict[tuple[int, int], np.ndarray]:
        """Keys of tables by row, [from rank, to rank].

        They are by the tables' width and the bytes of a number of their rows.
        """
        found: dict[tuple[int, int], np.ndarray] = {}
        by_row = (f.table for f in self.ids[0])
        by_row = (t for t in by_row if self.places[t].placement == "row")
        for table, first in first_ranks(by_row, self.world).items():
            if table not in self.unique[0]:
                continue  # All features of the table are by vectors.
            kind = self.tables[table][1], self.number[table]
            counts = found.setdefault(
                kind, np.zeros([self.world] * 2, np.int64)
            )
            for rank, unique in enumerate(self.unique):
                keys = np.setdiff1d(unique[table], self.places[table].hot_rows)
                owners = (keys.astype(np.int64) + first) % self.world
                counts[rank] += np.bincount(owners, minlength=self.world)
        return found

    def exchange(self) -> Exchange:
        if self.world == 1:
            return Exchange(1, ())
        messages = [
            each
            for (dim, number), counts in self.rows.items()
            for each in row_exchange.collectives(
                counts.max(), dim, min(self.element, number), self.element
            )
        ]
        if self.by_vectors:
            tables = [self.ids[0][i].table for i in self.by_vectors]
            messages += vector_exchange.collectives(
                max(f[i].bags for f in self.ids for i in self.by_vectors),
                sum(self.by_vectors.values()),
                sum(self.tables[table][1] for table in tables),
                self.element,
            )
        messages += self.hot_rows() + self._slices() + self._copies()
        return Exchange(self.world, tuple(messages))

    def hot_rows(self) -> list[Collective]:
        return hot_rows.collectives(
            sum(
                hot_rows.num_floats(len(place.hot_rows), self.tables[name][1])
                for name, place in self.places.items()
            )
        )

    def _slices(self) -> list[Collective]:
        words = np.zeros([self.world] * 2, np.int64)  # From each rank, to each.
        floats = np.zeros_like(words)
        widths = {
            name: self.tables[name][1] // len(place.ranks)
            for name, place in self.places.items()
            if place.ranks
        }
        if not widths:
            return []
        for rank, features in enumerate(self.ids):
            for f in features:
                for owner in self.places[f.table].ranks:
                    words[rank, owner] += words_of_piece(
                        f.bags, np.size(f.ids), f.ragged, f.weighted
                    )
                    floats[rank, owner] += f.bags * widths[f.table]
        unit = bag_exchange.unit_of(widths.values())
        return bag_exchange.collectives(
            words.max(), floats.max(), unit, self.element
        )

    def _copies(self) -> list[Collective]:
        counts: dict[int, np.ndarray] = {}
        for rank, unique in enumerate(self.unique):
            for table, keys in unique.items():
                if self.places[table].placement == "replicated":
                    dim = self.tables[table][1]
                    counts.setdefault(dim, np.zeros(self.world, np.int64))
                    counts[dim][rank] += keys.size
        most = {dim: each.max() for dim, each in counts.items()}
        return data_parallel.collectives(most, self.element)


def _unique_by_table(features: Iterable[FeatureIds]) -> dict[str, np.ndarray]:
    """The unique ids of each table."""
    ids: dict[str, list[np.ndarray]] = {}
    for feature in features:
        ids.setdefault(feature.table, []).append(np.ravel(feature.ids))
    return {t: np.unique(np.concatenate(each)) for t, each in ids.items()}


def exchange_of_ids(
    tables: Mapping[str, tuple[int, int]],
    places: Mapping[str, Place],
    ids: Sequence[Sequence[FeatureIds]],
    element: int = FLOAT,
    narrow: Collection[str] = (),
) -> Exchange:
    """The exchange of a step on given ids.

    Args:
        tables: each table's rows and width.
        places: each table's place.
        ids: for each rank, the ids of each feature.
        element: bytes of a number of vectors and gradients, and of float32
            rows.
        narrow: the tables whose numbers have two bytes.
    """
    return _Step(tables, places, ids, element, narrow).exchange()


def expected_traffic(
    tables: Mapping[str, tuple[int, int]],
    ids: Sequence[Sequence[FeatureIds]],
    hot_rows: Mapping[str, Sequence[int]] | None = None,
    element: int = FLOAT,
    narrow: Collection[str] = (),
) -> list[Traffic]:
    """The traffic of each replica in a step on tables sharded by row.

    `hot_rows` has by table the rows that each replica has a copy of; for the
    other arguments see `exchange_of_ids`.

    Returns:
        Each rank's traffic, as `RowWiseEngine.traffic` counts it.
    """
    hot = hot_rows or {}
    places = {t: Place("row", (), hot.get(t, ())) for t in tables}
    step = _Step(tables, places, ids, element, narrow)
    world = step.world
    if world == 1:
        return [Traffic(0, 0, 0)]  # Nothing is sent, nor counted.
    exchange = step.exchange()
    result = []
    for rank, features in enumerate(ids):
        unique = sum(keys.size for keys in step.unique[rank].values())
        unique += sum(np.size(features[i].ids) for i in step.by_vectors)
        result.append(Traffic(exchange.collectives, exchange.bytes, unique))
    return result


@functools.lru_cache(maxsize=65536)
def longest_message(mean: float, messages: int) -> int:
    """The length that none of some messages exceeds in half of the steps.

    A message has those of an owner's rows that occur in a batch. Their number
    is taken for a Poisson variable, which varies a little more.
    """
    if mean <= 0:
        return 0
    low = int(mean)
    k = np.arange(low, int(mean + 12 * math.sqrt(mean) + 40))
    logarithms = np.log(np.maximum(k, 1)).cumsum() - math.log(max(low, 1))
    p = np.exp(k * math.log(mean) - mean - math.lgamma(low + 1) - logarithms)
    more = np.cumsum(p[::-1])[::-1] - p  # P(length > k)
    return int(k[more * messages <= math.log(2)][0])
