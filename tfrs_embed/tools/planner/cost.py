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

from tfrs_embed.configs.hardware import Hardware
from tfrs_embed.distribution.traffic import WORD
from tfrs_embed.tools.planner.candidates import Demand

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


def row_operations(demand: Demand, hot: bool) -> float:
    """Operations of a replica in a step, of a table that is sharded by row.

    Args:
        demand: the table.
        hot: whether each replica has a copy of its hot rows.
    """
    if hot:
        return _OPERATIONS["row"] + _OPERATIONS["replicated"]
    by_rows = _OPERATIONS["row"] if demand.share_by_rows else 0.0
    return by_rows + len(demand.by_vectors) * _OPERATIONS["vectors"]


def copy_operations() -> float:
    """Operations of a replica in a step, of a table with a copy on each."""
    return _OPERATIONS["replicated"]


def piece_operations(slices: int) -> float:
    """Operations of a slice's owner in a step: for each replica's message.

    Args:
        slices: the number of the table's slices.
    """
    return slices * _OPERATIONS[_kind(slices)]


def piece_floats(demand: Demand, slices: int) -> int:
    """Floats of the vectors that a replica gets from the owner of a slice.

    Args:
        demand: the table.
        slices: the number of its slices.
    """
    return demand.usage.most_bags * demand.dim // slices


def copy_work(demand: Demand) -> float:
    """Weighted bytes of a replica in a step, of a table with a copy on each.

    Args:
        demand: the table.

    Returns:
        The bytes.
    """
    ids = demand.usage.ids
    moved = (_LOOKUP_PASSES + _GRADIENT_PASSES) * ids
    # Each replica updates the unique rows of all.
    unique = demand.usage.unique * len(demand.usage.owned)
    moved += _update_passes(demand) * unique
    moved *= _WEIGHTS["replicated"] * demand.row_bytes
    return moved + _ID_BYTES["replicated"] * ids


def transfer_time(sent: int, replicas: int, hardware: Hardware) -> float:
    """Seconds of sending: inside a host and out of it at the same time.

    Args:
        sent: the exchange's `passed_bytes`.
        replicas: the number of replicas.
        hardware: what they run on.
    """
    peers = replicas - 1
    if not peers:
        return 0.0
    on_host = hardware.on_host(replicas)
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
