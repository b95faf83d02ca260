"""The messages of a training step: their sizes, and how many there are.

All replicas of a collective send messages of one size, that of the longest,
rounded up by `bucket`. An `Exchange` has these sizes, and what follows from
them; `exchange_of_ids` finds them for given ids, to the byte, and
`expected_exchange` for ids of which no more than their use is known. Nothing
here needs TensorFlow.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfrs_embed.distribution.exchange_kind import (
    all_reduce_bytes,
    first_ranks,
    vectors_are_less,
)

FLOAT = 4  # Bytes of a number of a row, and of one that is sent unless told.
HALF = 2  # Bytes of a number of a row of bfloat16 or float16.
KEY = 8  # Bytes of a key.
WORD = 4  # Bytes of a number of a slice's message.
HEAD = 4  # Words that a piece begins with: flags, bags, ids, a spare one.
_INT32_MAX = 2**31 - 1


class Traffic(NamedTuple):
    """The traffic of one replica in a step; the fields of `engines.Traffic`."""

    collectives: int
    bytes: int
    least_bytes: int
    unique_keys: int


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
        bags: how many vectors become of them.
        ragged: whether bags have different numbers of ids, so that these
            travel too.
        weighted: whether the ids have weights.
    """

    table: str
    ids: Any
    bags: int
    ragged: bool = False
    weighted: bool = False


def bucket(count: float) -> int:
    """Rounds a count up to one of eight capacities per power of two."""
    n = max(math.ceil(count), 8)
    unit = 1 << (n.bit_length() - 4)
    return -(-n // unit) * unit


def collectives(widths: int) -> int:
    """Collectives of a training step on tables that are sharded by row.

    One agrees on the ids and on the capacities; then the keys, rows and
    gradients of each width. Features that are exchanged by vectors are left
    out.
    """
    return 1 + 3 * widths


def sent_bytes(
    peers: int,
    capacity: int,
    dim: int,
    element: int = FLOAT,
    number: int = FLOAT,
) -> int:
    """Bytes of one width of sharded tables to a number of peers.

    Each gets a message of keys, which begins with their number, and one of rows
    and one of gradients.

    Args:
        peers: the number of peers.
        capacity: the keys of a message.
        dim: the width.
        element: the bytes of a number of a gradient, or of a row of four bytes.
        number: the bytes of a number of the table's rows.
    """
    keys = KEY * (1 + capacity)
    row = min(element, number)  # Rows of two bytes are sent as they are.
    return peers * (keys + (row + element) * dim * capacity)


def least_bytes(
    remote_keys: float, dim: int, element: int = FLOAT, number: int = FLOAT
) -> float:
    """Bytes of one width for keys of other replicas, without any padding."""
    return remote_keys * (KEY + (min(element, number) + element) * dim)


def bag_size(bags: int, ids: int, ragged: bool) -> int | None:
    """The number of ids in each of a feature's bags.

    Args:
        bags: how many bags there are.
        ids: how many ids they have together.
        ragged: whether they may differ.

    Returns:
        The number; None: it isn't the same in all.
    """
    if ragged or not bags or ids % bags:
        return None
    return ids // bags


def id_words(rows: int, weighted: bool = False) -> int:
    """Words of an id that travels with its bag.

    Args:
        rows: the table's rows, which decide how long an id is.
        weighted: whether it has a weight.

    Returns:
        The number of 4-byte words.
    """
    return (2 if rows > _INT32_MAX else 1) + weighted


def piece_words(
    bags: float, ids: float, rows: int, ragged: bool, weighted: bool = False
) -> float:
    """Words of a feature's ids in the message to a rank with its table's slice.

    Args:
        bags: how many vectors become of the ids.
        ids: the number of ids.
        rows: the table's rows, which decide how long an id is.
        ragged: whether the bags' sizes travel.
        weighted: whether weights travel.

    Returns:
        The number of 4-byte words.
    """
    return HEAD + ragged * bags + id_words(rows, weighted) * ids


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The sizes of a step's messages, after rounding.

    Attributes:
        replicas: the number of replicas.
        row: for each width of tables that are sharded by row, the keys of a
            message. A width has none if all of its features are exchanged by
            vectors.
        vectors: words of a message of bags, and floats of a message of vectors,
            of all features of tables sharded by row that are exchanged by
            vectors; None: there are none.
        slices: words of a message of ids, and floats of a message of vectors,
            of all tables on one rank and in columns; None: there are none.
        replicated: for each width of replicated tables, the keys of a message.
        halves: as `row`, of tables whose numbers have two bytes.
        hot: numbers of the all-reduce of hot rows' gradients; 0: there are
            none.
        element: bytes of a number of vectors and gradients, and of rows of four
            bytes.
    """

    replicas: int
    row: Mapping[int, int]
    vectors: tuple[int, int] | None
    slices: tuple[int, int] | None
    replicated: Mapping[int, int]
    halves: Mapping[int, int] = dataclasses.field(default_factory=dict)
    hot: int = 0
    element: int = FLOAT

    @property
    def all_to_all_bytes(self) -> int:
        """Bytes that a replica sends to the others, to each its own."""
        peers = self.replicas - 1
        total = sum(
            sent_bytes(peers, c, dim, self.element, number)
            for messages, number in ((self.row, FLOAT), (self.halves, HALF))
            for dim, c in messages.items()
        )
        if self.vectors is not None:
            total += peers * self.element * self.vectors[1]
        if self.slices is not None:
            words, floats = self.slices
            total += peers * (WORD * words + 2 * self.element * floats)
        return total

    @property
    def all_gather_bytes(self) -> int:
        """Bytes that a replica sends for all others alike."""
        if self.replicas == 1:
            return 0
        size = self.element
        total = sum(c * (KEY + size * d) for d, c in self.replicated.items())
        if self.vectors is not None:
            bags, vectors = self.vectors  # Vectors have gradients.
            total += WORD * bags + size * vectors
        return total

    @property
    def all_reduce_bytes(self) -> int:
        """Bytes that a replica sends to its neighbour, of hot rows."""
        return all_reduce_bytes(self.hot, self.replicas)

    @property
    def bytes(self) -> int:
        """Bytes that a replica sends."""
        return (
            self.all_to_all_bytes
            + self.all_gather_bytes
            + self.all_reduce_bytes
        )

    @property
    def exchanges(self) -> int:
        """Collectives that rows, vectors or gradients travel in."""
        if self.replicas == 1:
            return 0
        together = (self.vectors is not None) + (self.slices is not None)
        of_all_to_alls = 3 * (len(self.row) + len(self.halves) + together)
        return of_all_to_alls + 2 * len(self.replicated) + bool(self.hot)

    @property
    def collectives(self) -> int:
        """All collectives, with those that agree on sizes and on the ids."""
        if self.replicas == 1:
            return 0
        # The consensus on ids finds the sizes of tables by row, too.
        return self.exchanges + 1 + bool(self.slices) + bool(self.replicated)


def slice_messages(
    words: int, floats: int, widths: Iterable[int]
) -> tuple[int, int]:
    """The sizes of messages to the owners of slices, rounded up.

    Args:
        words: those of the longest message of ids.
        floats: those of the longest message of vectors.
        widths: the widths of all slices. Vectors are moved in units of their
            greatest common divisor.

    Returns:
        The sizes of messages of ids, in words, and of vectors, in floats.
    """
    unit = math.gcd(*widths)
    return bucket(int(words)), unit * bucket(int(floats) // unit)


def vector_messages(bags: int, words: int, floats: int) -> tuple[int, int]:
    """The sizes of messages of features exchanged by vectors, rounded up.

    Args:
        bags: the most that a feature has on any replica.
        words: those of a bag of each feature.
        floats: those of a vector of each feature.

    Returns:
        The sizes of messages of bags, in words, and of vectors, in floats.
    """
    return bucket(bags * words), bucket(bags * floats)


def _by_vectors(
    tables: Mapping[str, tuple[int, int]],
    places: Mapping[str, Place],
    ids: Sequence[Sequence[FeatureIds]],
    element: int,
    narrow: Collection[str],
) -> dict[int, int]:
    """The features that are exchanged by vectors: the sizes of their bags."""
    found = {}
    for i, of_ranks in enumerate(zip(*ids, strict=True)):
        table = of_ranks[0].table
        # A replica may have no bags.
        size = bag_size(
            sum(f.bags for f in of_ranks),
            sum(np.size(f.ids) for f in of_ranks),
            any(f.ragged for f in of_ranks),
        )
        if (
            places[table].placement == "row"
            and not len(places[table].hot_rows)
            and size is not None
            and vectors_are_less(
                size,
                tables[table][1],
                len(ids),
                element,
                HALF if table in narrow else FLOAT,
            )
        ):
            found[i] = size
    return found


def _unique_by_table(
    features: Iterable[FeatureIds],
) -> dict[str, np.ndarray]:
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
        element: bytes of a number of vectors and gradients, and of rows of four
            bytes.
        narrow: the tables whose numbers have two bytes.

    Returns:
        The exchange.
    """
    world = len(ids)
    by_vectors = _by_vectors(tables, places, ids, element, narrow)
    first = first_ranks(
        (f.table for f in ids[0] if places[f.table].placement == "row"), world
    )
    keys: dict[int, np.ndarray] = {}
    halves: dict[int, np.ndarray] = {}
    copies: dict[int, np.ndarray] = {}
    words = np.zeros((world, world), np.int64)  # To each rank, from each.
    floats = np.zeros((world, world), np.int64)
    for rank, features in enumerate(ids):
        for feature in features:
            place = places[feature.table]
            rows, dim = tables[feature.table]
            for owner in place.ranks:
                words[rank, owner] += int(
                    piece_words(
                        feature.bags,
                        np.size(feature.ids),
                        rows,
                        feature.ragged,
                        feature.weighted,
                    )
                )
                floats[rank, owner] += feature.bags * dim // len(place.ranks)
        others = [f for i, f in enumerate(features) if i not in by_vectors]
        for table, unique in _unique_by_table(others).items():
            dim = tables[table][1]
            if places[table].placement == "row":
                of_dtype = halves if table in narrow else keys
                counts = of_dtype.setdefault(dim, np.zeros_like(words))
                unique = np.setdiff1d(unique, places[table].hot_rows)
                owners = (unique.astype(np.int64) + first[table]) % world
                counts[rank] += np.bincount(owners, minlength=world)
            elif places[table].placement == "replicated":
                copies.setdefault(dim, np.zeros(world, np.int64))
                copies[dim][rank] += unique.size
    vectors = None
    if by_vectors:
        mine = {i: ids[0][i] for i in by_vectors}
        vectors = vector_messages(
            max(features[i].bags for features in ids for i in by_vectors),
            sum(
                by_vectors[i] * id_words(tables[f.table][0], f.weighted)
                for i, f in mine.items()
            ),
            sum(tables[f.table][1] for f in mine.values()),
        )
    widths = [
        tables[name][1] // len(place.ranks)
        for name, place in places.items()
        if place.ranks
    ]
    slices = None
    if widths:
        slices = slice_messages(words.max(), floats.max(), widths)
    return Exchange(
        world,
        {dim: bucket(counts.max()) for dim, counts in keys.items()},
        vectors,
        slices,
        {dim: bucket(counts.max()) for dim, counts in copies.items()},
        {dim: bucket(counts.max()) for dim, counts in halves.items()},
        sum(
            hot_floats(len(place.hot_rows), tables[name][1])
            for name, place in places.items()
        ),
        element,
    )


def hot_floats(rows: int, dim: int) -> int:
    """Numbers of an all-reduce for hot rows: gradients, and who had them.

    Args:
        rows: how many rows.
        dim: their width.
    """
    return rows * (dim + 1)


def expected_traffic(
    tables: Mapping[str, tuple[int, int]],
    ids: Sequence[Sequence[FeatureIds]],
    hot_rows: Mapping[str, Sequence[int]] | None = None,
    element: int = FLOAT,
    narrow: Collection[str] = (),
) -> list[Traffic]:
    """The traffic of each replica in a step on tables sharded by row.

    Args:
        tables: each table's rows and width.
        ids: for each rank, the ids of each feature.
        hot_rows: by table, the rows that each replica has a copy of.
        element: bytes of a number of vectors and gradients, and of rows of four
            bytes.
        narrow: the tables whose numbers have two bytes.

    Returns:
        Each rank's traffic, as `RowWiseEngine.traffic` counts it.
    """
    world = len(ids)
    if world == 1:
        return [Traffic(0, 0, 0, 0)]  # Nothing is sent, nor counted.
    hot = hot_rows or {}
    places = {t: Place("row", (), hot.get(t, ())) for t in tables}
    exchange = exchange_of_ids(tables, places, ids, element, narrow)
    by_vectors = _by_vectors(tables, places, ids, element, narrow)
    first = first_ranks((f.table for f in ids[0]), world)
    result = []
    for rank, features in enumerate(ids):
        least, total = float(exchange.all_reduce_bytes), 0
        others = [f for i, f in enumerate(features) if i not in by_vectors]
        for table, unique in _unique_by_table(others).items():
            total += unique.size
            unique = np.setdiff1d(unique, places[table].hot_rows)
            owners = (unique.astype(np.int64) + first[table]) % world
            remote = int(np.count_nonzero(owners != rank))
            number = HALF if table in narrow else FLOAT
            least += least_bytes(remote, tables[table][1], element, number)
        for i, size in by_vectors.items():
            feature = features[i]
            rows, dim = tables[feature.table]
            words = size * id_words(rows, feature.weighted)
            # A vector for each of the others, and a gradient for all.
            least += feature.bags * (WORD * words + world * element * dim)
            total += np.size(feature.ids)
        result.append(
            Traffic(exchange.collectives, exchange.bytes, int(least), total)
        )
    return result


@functools.lru_cache(maxsize=65536)
def longest_message(mean: float, messages: int) -> int:
    """The longest of many messages of one mean length.

    A message's length is a sum of zeros and ones: which of an owner's rows
    occur in a batch. Of a Poisson variable of the same mean, which varies a
    little more, this errs on the long side.

    Args:
        mean: the mean length.
        messages: the number of messages.

    Returns:
        The smallest length that no message exceeds in half of the steps.
    """
    if mean <= 0:
        return 0
    low = int(mean)
    k = np.arange(low, int(mean + 12 * math.sqrt(mean) + 40))
    logarithms = np.log(np.maximum(k, 1)).cumsum() - math.log(max(low, 1))
    p = np.exp(k * math.log(mean) - mean - math.lgamma(low + 1) - logarithms)
    more = np.cumsum(p[::-1])[::-1] - p  # P(length > k)
    return int(k[more * messages <= math.log(2)][0])
