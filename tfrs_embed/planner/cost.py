"""A model of the time of a training step's work on tables.

The time is the sum of four, which do not overlap:

- memory: bytes that lookups and updates read and write, of the replica that
  has most to do; of all replicas of a host where they share its memory. An id
  costs a number of passes over its row: the lookup reads and writes it, its
  gradient is read and added, and the update reads and writes the row and each
  slot. Where a table is replicated each replica updates the unique rows of all.
  An id itself costs the time of a number of bytes, most of all by row, where
  ids are sorted by owner and repeated ones are found. Features of such tables
  that are exchanged by vectors have weights of their own; a shard also moves
  a vector and a gradient of each bag of all replicas.
  Hot rows are summed, and updated on each replica like rows of a replicated
  table.
- operations: those that each table and each slice needs, whatever its size; of
  all replicas of a host where they share its cores.
- transfer: bytes sent inside the host and out of it, which overlap.
- latency: of each collective, for each level of switches, and of each message.

The weights are fitted to training steps that `benchmarks/fit_planner.py`
measured on two CPU cores, so that they stand for caches and copies as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from tfrs_embed.distribution.exchange_kind import first_ranks
from tfrs_embed.planner.candidates import Demand
from tfrs_embed.planner.hardware import Hardware
from tfrs_embed.planner.traffic import (
    HALF,
    WORD,
    Exchange,
    Place,
    bucket,
    hot_floats,
    longest_message,
    slice_messages,
    vector_messages,
)

_LOOKUP_PASSES = 2
_GRADIENT_PASSES = 2
# A vector that is exchanged, and its gradient, are copied into messages and
# out of them, and the shards' parts are summed.
_VECTOR_PASSES = 8
# The gradients of hot rows, of a batch or not, are written, and read and added
# by the all-reduce.
_ALL_REDUCE_PASSES = 4

#: Time of a byte in memory, beside one at the memory's bandwidth.
_WEIGHTS = {
    "row": 0.45,
    "vectors": 0.05,
    "table": 0.25,
    "column": 0.25,
    "replicated": 0.45,
}
#: As many bytes take the time that an id itself takes, whatever its row's
#: width: to be found among others, routed, sorted and summed.
_ID_BYTES = {
    "row": 670,
    "vectors": 220,
    "table": 100,
    "column": 150,
    "replicated": 900,
}
#: Operations of a table, of a slice of one, or of a feature by vectors.
_OPERATIONS = {
    "row": 5.5,
    "vectors": 12.5,
    "table": 4.5,
    "column": 3.0,
    "replicated": 6.5,
}


def _update_passes(demand: Demand) -> float:
    return 2 * demand.state_bytes / demand.row_bytes


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The time of a step, in seconds.

    Attributes:
        memory: of reading and writing rows.
        operations: of starting operations.
        transfer: of sending bytes.
        latency: of collectives and messages.
    """

    memory: float
    operations: float
    transfer: float
    latency: float

    @property
    def seconds(self) -> float:
        """The sum."""
        return self.memory + self.operations + self.transfer + self.latency


@dataclasses.dataclass(frozen=True, eq=False)
class Prediction:
    """What a step costs.

    Attributes:
        time: its time.
        exchange: its messages.
        memory: bytes of tables and slots that each replica holds, [replicas]
            int64.
        lookups: rows, or slices of rows, that each replica reads, [replicas]
            float64.
        work: bytes that each replica reads and writes, weighted, [replicas]
            float64.
    """

    time: StepTime
    exchange: Exchange
    memory: np.ndarray
    lookups: np.ndarray
    work: np.ndarray

    @property
    def imbalance(self) -> float:
        """The most work of a replica, over the mean; 1 if there is none."""
        mean = float(self.work.mean())
        return float(self.work.max()) / mean if mean else 1.0


def _kind(slices: int) -> str:
    """The placement whose weights count: one slice is a whole table.

    Columns of a table that is too narrow to be cut are one slice.
    """
    return "table" if slices == 1 else "column"


def piece_work(demand: Demand, slices: int, replicas: int) -> float:
    """Weighted bytes that the owner of a slice reads and writes in a step.

    Args:
        demand: the table.
        slices: the number of its slices.
        replicas: the number of replicas, all of whose ids it gets.

    Returns:
        The bytes.
    """
    ids = demand.usage.ids * replicas
    passes = _LOOKUP_PASSES + _GRADIENT_PASSES + _update_passes(demand)
    kind = _kind(slices)
    moved = _WEIGHTS[kind] * passes * demand.row_bytes / slices
    return ids * (moved + _ID_BYTES[kind])


def hot_work(demand: Demand) -> float:
    """Weighted bytes of a replica in a step, of a table that has hot rows.

    Args:
        demand: the table.

    Returns:
        The bytes.
    """
    hot = demand.usage.hot
    assert hot is not None
    passes = _LOOKUP_PASSES + _GRADIENT_PASSES + _update_passes(demand)
    moved = _WEIGHTS["row"] * passes * demand.row_bytes + _ID_BYTES["row"]
    # Of the copies, each replica updates all that any has looked up.
    updated = min(len(hot.ids), hot.unique * len(hot.owned))
    rows = _ALL_REDUCE_PASSES * len(hot.ids)
    rows_updated = _update_passes(demand) * updated
    copies = _WEIGHTS["replicated"] * demand.row_bytes * (rows + rows_updated)
    return demand.usage.ids * moved + copies


def row_work(demand: Demand) -> float:
    """Weighted bytes of a replica in a step, of a table that is sharded by row.

    Args:
        demand: the table.

    Returns:
        The bytes.
    """
    passes = _LOOKUP_PASSES + _GRADIENT_PASSES + _update_passes(demand)
    replicas = len(demand.usage.owned)
    ids = {"vectors": demand.ids_by_vectors}
    ids["row"] = demand.usage.ids - ids["vectors"]
    total = sum(
        n * (_WEIGHTS[kind] * passes * demand.row_bytes + _ID_BYTES[kind])
        for kind, n in ids.items()
    )
    bags = replicas * sum(f.most_bags for f in demand.by_vectors)
    return total + bags * _VECTOR_PASSES * demand.row_bytes


def piece_floats(demand: Demand, slices: int) -> int:
    """Floats of the vectors that a replica gets from the owner of a slice.

    Args:
        demand: the table.
        slices: the number of its slices.
    """
    return demand.usage.most_bags * demand.dim // slices


def expected_exchange(
    demands: Sequence[Demand], places: Sequence[Place], replicas: int
) -> Exchange:
    """The exchange that the tables' use lets expect.

    Args:
        demands: the tables.
        places: each one's place.
        replicas: the number of replicas.

    Returns:
        The exchange.
    """
    owned: dict[tuple[int, int], np.ndarray] = {}
    bags = bag_words = vector_floats = hot = 0
    copies: dict[int, float] = {}
    words = np.zeros(replicas, np.int64)
    floats = np.zeros(replicas, np.int64)
    first = first_ranks(
        (
            demand.name
            for demand, place in zip(demands, places, strict=True)
            if place.placement == "row"
        ),
        replicas,
    )
    for demand, place in zip(demands, places, strict=True):
        if place.hot_rows and demand.usage.hot is not None:
            means = np.roll(demand.usage.hot.owned, first[demand.name])
            kind = demand.dim, demand.number
            owned[kind] = owned.get(kind, 0.0) + means
            hot += hot_floats(len(place.hot_rows), demand.dim)
        elif place.placement == "row":
            share = demand.share_by_rows
            if share:
                means = np.roll(demand.usage.owned, first[demand.name])
                means = share * means
                kind = demand.dim, demand.number
                owned[kind] = owned.get(kind, 0.0) + means
            bags = max([bags, *(f.most_bags for f in demand.by_vectors)])
            bag_words += demand.bag_words
            vector_floats += len(demand.by_vectors) * demand.dim
        elif place.placement == "replicated":
            most = demand.usage.most_unique
            copies[demand.dim] = copies.get(demand.dim, 0.0) + most
        else:
            ranks = list(place.ranks)
            words[ranks] += demand.message_words
            floats[ranks] += piece_floats(demand, len(ranks))
    row: dict[int, int] = {}
    halves: dict[int, int] = {}
    for (dim, number), means in owned.items():
        # Those who are asked for most decide, each by all replicas.
        high = float(means.max())
        owners = int((means > 0.95 * high).sum())
        of_dtype = halves if number == HALF else row
        longest = longest_message(round(high, 3), owners * replicas)
        of_dtype[dim] = bucket(longest)
    vectors = None
    if bags:
        vectors = vector_messages(bags, bag_words, vector_floats)
    slices = None
    widths = [
        demand.dim // len(place.ranks)
        for demand, place in zip(demands, places, strict=True)
        if place.ranks
    ]
    if widths:
        slices = slice_messages(int(words.max()), int(floats.max()), widths)
    return Exchange(
        replicas,
        row,
        vectors,
        slices,
        {dim: bucket(c) for dim, c in copies.items()},
        halves,
        hot,
        demands[0].element,
    )


def predict(
    demands: Sequence[Demand], places: Sequence[Place], hardware: Hardware
) -> Prediction:
    """Predicts what a step costs.

    Args:
        demands: the tables.
        places: each one's place.
        hardware: what the replicas run on.

    Returns:
        The prediction.
    """
    replicas = len(demands[0].usage.owned)
    memory = np.zeros(replicas, np.int64)
    lookups = np.zeros(replicas)
    work = np.zeros(replicas)
    operations = np.zeros(replicas)
    for demand, place in zip(demands, places, strict=True):
        ids, name = demand.usage.ids, place.placement
        update = _update_passes(demand)
        if place.ranks:
            ranks = list(place.ranks)
            memory[ranks] += demand.bytes // len(ranks)
            lookups[ranks] += ids * replicas
            work[ranks] += piece_work(demand, len(ranks), replicas)
            # Each replica writes a message to each owner.
            operations += len(ranks) * _OPERATIONS[_kind(len(ranks))]
            continue
        if name == "row":
            of_row = demand.state_bytes
            base, more = divmod(demand.rows, replicas)
            memory += base * of_row
            memory[:more] += of_row
            if place.hot_rows:
                memory += demand.hot_bytes
                work += hot_work(demand)
                operations += _OPERATIONS["row"] + _OPERATIONS["replicated"]
            else:
                work += row_work(demand)
                if demand.share_by_rows:
                    operations += _OPERATIONS["row"]
                operations += len(demand.by_vectors) * _OPERATIONS["vectors"]
        else:
            memory += demand.bytes
            moved = (_LOOKUP_PASSES + _GRADIENT_PASSES) * ids
            moved += update * demand.usage.unique * replicas
            work += _WEIGHTS[name] * moved * demand.row_bytes
            work += _ID_BYTES[name] * ids
            operations += _OPERATIONS[name]
        lookups += ids
    exchange = expected_exchange(demands, places, replicas)
    on_host = hardware.on_host(replicas)
    busiest, started = float(work.max()), float(operations.max())
    if hardware.shared:
        started *= on_host
        starts = range(0, replicas, on_host)
        busiest = float(np.add.reduceat(work, starts).max())
    time = StepTime(
        memory=busiest / hardware.memory_bandwidth,
        operations=started * hardware.operation,
        transfer=_transfer(exchange, hardware),
        latency=exchange.collectives
        * hardware.levels(replicas)
        * hardware.latency
        # A ring goes around twice.
        + (exchange.exchanges + bool(exchange.hot))
        * (replicas - 1)
        * hardware.message,
    )
    return Prediction(time, exchange, memory, lookups, work)


def _transfer(exchange: Exchange, hardware: Hardware) -> float:
    """Seconds of sending: inside a host and out of it at the same time."""
    peers = exchange.replicas - 1
    if not peers:
        return 0.0
    # In an all-gather a replica passes on what it gets.
    sent = exchange.all_to_all_bytes + peers * exchange.all_gather_bytes
    sent += exchange.all_reduce_bytes
    on_host = hardware.on_host(exchange.replicas)
    inside = sent * (on_host - 1) / peers
    outside = sent - inside
    if hardware.shared:
        inside, outside = inside * on_host, outside * on_host
    return max(
        inside / hardware.inside_bandwidth,
        outside / hardware.outside_bandwidth,
    )


def move_time(demand: Demand, slices: int, hardware: Hardware) -> float:
    """Seconds that a slice adds to its owner: what owners are balanced by.

    Args:
        demand: the table.
        slices: the number of its slices.
        hardware: what the replicas run on.

    Returns:
        The seconds.
    """
    replicas = len(demand.usage.owned)
    size = WORD * demand.message_words
    size += 2 * demand.element * piece_floats(demand, slices)
    sent = (replicas - 1) * size
    seconds = sent / hardware.inside_bandwidth
    if not hardware.shared:
        work = piece_work(demand, slices, replicas)
        seconds += work / hardware.memory_bandwidth
    return seconds
