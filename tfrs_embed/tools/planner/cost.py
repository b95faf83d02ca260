"""The time of a training step's work on tables.

The time is the sum of five: reading and writing rows; starting operations;
sending bytes; the latency of collectives and messages; pages of tables in
files, which the disk reads and writes. The section "The time of
a step" of docs/planning.md describes the model. The weights are fitted to
training steps that `benchmarks/fit_planner.py` measured on two CPU cores, so
they include the effects of caches.
"""

from __future__ import annotations

import dataclasses

from tfrs_embed.configs.hardware import Hardware
from tfrs_embed.distribution.traffic import WORD
from tfrs_embed.tools.planner.candidates import Demand

_LOOKUP_PASSES = 2
_GRADIENT_PASSES = 2
# A vector that is exchanged, and its gradient, are copied into messages and out
# of them, and the shards' parts are summed.
_VECTOR_PASSES = 8
# Gradients of hot rows, looked up or not, are written, read and added.
_ALL_REDUCE_PASSES = 4

#: The time of a byte of rows, over that of a byte at the memory's bandwidth.
_WEIGHTS = {
    "row": 0.45,
    "vectors": 0.05,
    "table": 0.25,
    "column": 0.25,
    "replicated": 0.45,
}
#: The bytes whose time an id costs, whatever its row's width.
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


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The five parts of a step's time, in seconds."""

    memory: float
    operations: float
    transfer: float
    latency: float
    disk: float

    @property
    def seconds(self) -> float:
        """The sum of the parts."""
        return sum(dataclasses.astuple(self))


def _update_passes(demand: Demand) -> float:
    return 2 * demand.state_bytes / demand.row_bytes


def _passes(demand: Demand) -> float:
    return _LOOKUP_PASSES + _GRADIENT_PASSES + _update_passes(demand)


def of_slice(demand: Demand, slices: int) -> tuple[float, float]:
    """The work of a slice's owner, and operations for all slices of its table.

    The owner gets the ids of all replicas.

    Returns:
        The bytes that are read and written in a step, weighted; and the number
        of operations.
    """
    # A table that is too narrow to be cut has one slice of columns.
    kind = "table" if slices == 1 else "column"
    moved = _WEIGHTS[kind] * _passes(demand) * demand.row_bytes / slices
    ids = demand.usage.ids * len(demand.usage.owned)
    return ids * (moved + _ID_BYTES[kind]), slices * _OPERATIONS[kind]


def slice_floats(demand: Demand, slices: int) -> int:
    """Floats of the vectors that a replica gets from the owner of a slice."""
    return demand.usage.most_bags * demand.dim // slices


def of_hot_rows(demand: Demand) -> tuple[float, float]:
    """A replica's work and operations for a table by row with hot rows."""
    hot = demand.usage.hot
    assert hot is not None
    moved = _WEIGHTS["row"] * _passes(demand) * demand.row_bytes
    moved += _ID_BYTES["row"]
    # Each replica updates the copies that any replica has looked up.
    updated = min(len(hot.ids), hot.unique * len(hot.owned))
    rows = _ALL_REDUCE_PASSES * len(hot.ids)
    rows_updated = _update_passes(demand) * updated
    copies = _WEIGHTS["replicated"] * demand.row_bytes * (rows + rows_updated)
    operations = _OPERATIONS["row"] + _OPERATIONS["replicated"]
    return demand.usage.ids * moved + copies, operations


def of_rows(demand: Demand) -> tuple[float, float]:
    """A replica's work and operations for a table by row without hot rows."""
    replicas = len(demand.usage.owned)
    ids = {"vectors": demand.ids_by_vectors}
    ids["row"] = demand.usage.ids - ids["vectors"]
    passes = _passes(demand)
    total = sum(
        n * (_WEIGHTS[kind] * passes * demand.row_bytes + _ID_BYTES[kind])
        for kind, n in ids.items()
    )
    bags = replicas * sum(f.most_bags for f in demand.by_vectors)
    operations = len(demand.by_vectors) * _OPERATIONS["vectors"]
    if demand.share_by_rows:
        operations += _OPERATIONS["row"]
    return total + bags * _VECTOR_PASSES * demand.row_bytes, operations


def of_copy(demand: Demand) -> tuple[float, float]:
    """A replica's work and operations for a replicated table."""
    ids = demand.usage.ids
    moved = (_LOOKUP_PASSES + _GRADIENT_PASSES) * ids
    # Each replica updates the unique rows of all.
    unique = demand.usage.unique * len(demand.usage.owned)
    moved += _update_passes(demand) * unique
    moved *= _WEIGHTS["replicated"] * demand.row_bytes
    return moved + _ID_BYTES["replicated"] * ids, _OPERATIONS["replicated"]


def transfer_time(sent: int, replicas: int, hardware: Hardware) -> float:
    """Seconds to send bytes inside hosts and between them at the same time."""
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
    """Seconds that one of a table's slices adds to its owner's step."""
    replicas = len(demand.usage.owned)
    size = WORD * demand.message_words
    size += 2 * demand.element * slice_floats(demand, slices)
    sent = (replicas - 1) * size
    seconds = sent / hardware.inside_bandwidth
    if not hardware.shared:
        work, _ = of_slice(demand, slices)
        seconds += work / hardware.memory_bandwidth
    return seconds
