"""The messages of a training step: their sizes, and how many there are.

All replicas of a collective send messages of one size, that of the longest,
rounded up by `bucket`. An `Exchange` has these sizes, and what follows from
them; `exchange_of_ids` finds them for given ids, to the byte, and
`expected_exchange` for ids of which no more than their use is known. This
module needs numpy alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

FLOAT = 4  # Bytes of a number of a row.
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
    """

    placement: str
    ranks: tuple[int, ...] = ()


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

    One agrees on the ids, one on the capacities; then the keys, rows and
    gradients of each width.
    """
    return 2 + 3 * widths


def sent_bytes(peers: int, capacity: int, dim: int) -> int:
    """Bytes of one width of sharded tables to a number of peers.

    Each gets a message of keys, which begins with their number, and one of rows
    and one of gradients.
    """
    keys = KEY * (1 + capacity)
    return peers * (keys + 2 * FLOAT * dim * capacity)


def least_bytes(remote_keys: float, dim: int) -> float:
    """Bytes of one width for keys of other replicas, without any padding."""
    return remote_keys * (KEY + 2 * FLOAT * dim)


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
    wide = 2 if rows > _INT32_MAX else 1
    return HEAD + ragged * bags + wide * ids + weighted * ids


@dataclasses.dataclass(frozen=True)
class Exchange:
    """The sizes of a step's messages, after rounding.

    Attributes:
        replicas: the number of replicas.
        row: for each width of tables that are sharded by row, the keys of a
            message.
        slices: words of a message of ids, and floats of a message of vectors,
            of all tables on one rank and in columns; None: there are none.
        replicated: for each width of replicated tables, the keys of a message.
    """

    replicas: int
    row: Mapping[int, int]
    slices: tuple[int, int] | None
    replicated: Mapping[int, int]

    @property
    def all_to_all_bytes(self) -> int:
        """Bytes that a replica sends to the others, to each its own."""
        peers = self.replicas - 1
        total = sum(sent_bytes(peers, c, dim) for dim, c in self.row.items())
        if self.slices is not None:
            words, floats = self.slices
            total += peers * (WORD * words + 2 * FLOAT * floats)
        return total

    @property
    def all_gather_bytes(self) -> int:
        """Bytes that a replica sends for all others alike."""
        if self.replicas == 1:
            return 0
        return sum(c * (KEY + FLOAT * d) for d, c in self.replicated.items())

    @property
    def bytes(self) -> int:
        """Bytes that a replica sends."""
        return self.all_to_all_bytes + self.all_gather_bytes

    @property
    def exchanges(self) -> int:
        """Collectives with a message for each peer."""
        if self.replicas == 1:
            return 0
        slices = 0 if self.slices is None else 3
        return 3 * len(self.row) + slices + 2 * len(self.replicated)

    @property
    def collectives(self) -> int:
        """All collectives, with those that agree on sizes and on the ids."""
        if self.replicas == 1:
            return 0
        engines = bool(self.row) + bool(self.slices) + bool(self.replicated)
        return self.exchanges + engines + 1


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


def exchange_of_ids(
    tables: Mapping[str, tuple[int, int]],
    places: Mapping[str, Place],
    ids: Sequence[Sequence[FeatureIds]],
) -> Exchange:
    """The exchange of a step on given ids.

    Args:
        tables: each table's rows and width.
        places: each table's place.
        ids: for each rank, the ids of each feature.

    Returns:
        The exchange.
    """
    world = len(ids)
    keys: dict[int, np.ndarray] = {}
    copies: dict[int, np.ndarray] = {}
    words = np.zeros((world, world), np.int64)  # To each rank, from each.
    floats = np.zeros((world, world), np.int64)
    for rank, features in enumerate(ids):
        by_table: dict[str, list[Any]] = {}
        for feature in features:
            by_table.setdefault(feature.table, []).append(feature.ids)
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
        for table, arrays in by_table.items():
            dim = tables[table][1]
            unique = np.unique(np.concatenate([np.ravel(a) for a in arrays]))
            if places[table].placement == "row":
                counts = keys.setdefault(dim, np.zeros_like(words))
                counts[rank] += np.bincount(
                    unique.astype(np.int64) % world, minlength=world
                )
            elif places[table].placement == "replicated":
                copies.setdefault(dim, np.zeros(world, np.int64))
                copies[dim][rank] += unique.size
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
        slices,
        {dim: bucket(counts.max()) for dim, counts in copies.items()},
    )


def expected_traffic(
    ids: Sequence[Mapping[str, Any]], dims: Mapping[str, int]
) -> list[Traffic]:
    """The traffic of each replica in a step on tables sharded by row.

    Args:
        ids: for each rank the ids that it looks up, by table.
        dims: each table's width.

    Returns:
        Each rank's traffic, as `ShardedEngine.traffic` counts it.
    """
    world = len(ids)
    if world == 1:
        return [Traffic(0, 0, 0, 0)]  # Nothing is sent, nor counted.
    exchange = exchange_of_ids(
        {table: (1, dim) for table, dim in dims.items()},
        dict.fromkeys(dims, Place("row")),
        [[FeatureIds(t, i, 0) for t, i in each.items()] for each in ids],
    )
    result = []
    for rank, by_table in enumerate(ids):
        least, total = 0.0, 0
        for table, looked_up in by_table.items():
            unique = np.unique(np.asarray(looked_up))
            remote = int(np.count_nonzero(unique % world != rank))
            least += least_bytes(remote, dims[table])
            total += unique.size
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
