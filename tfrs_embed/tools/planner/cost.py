"""What a table costs in a training step.

The section "The time of a step" of docs/planning.md describes the model. The
weights are fitted to training steps that `benchmarks/fit_planner.py` measured
on two CPU cores, so they include the effects of caches.
"""

from __future__ import annotations

from typing import NamedTuple

from tfrs_embed.configs.hardware import Hardware
from tfrs_embed.distribution import hot_rows
from tfrs_embed.distribution.bag_messages import piece_words
from tfrs_embed.distribution.traffic import WORD
from tfrs_embed.tools.planner.candidates import Candidate, Demand

# Passes over a row, for its lookup and its gradient.
_PASSES = 4
# A vector that is exchanged, and its gradient, are copied into messages and out
# of them, and the shards' parts are summed.
_VECTOR_PASSES = 8
# Gradients of hot rows, looked up or not, are written, read and added.
_ALL_REDUCE_PASSES = 4


class Weights(NamedTuple):
    """What was fitted of a placement, and of features by vectors.

    Attributes:
        byte: the time of a byte of rows, over that of one at the memory's
            bandwidth.
        id_bytes: the bytes whose time an id costs, whatever its row's width.
        operations: operations of a table, of a slice of one, or of a feature by
            vectors.
    """

    byte: float
    id_bytes: int
    operations: float


WEIGHTS = {
    "row": Weights(0.45, 670, 5.5),
    "vectors": Weights(0.05, 220, 12.5),
    "table": Weights(0.25, 100, 4.5),
    "column": Weights(0.25, 150, 3.0),
    "replicated": Weights(0.45, 900, 6.5),
}


class Cost(NamedTuple):
    """What a table costs each replica; or each of its slices, the owner.

    Attributes:
        memory: bytes of a slice, or of a copy; 0 of a table by row.
        lookups: rows, or slices of rows, that are read.
        work: weighted bytes that are read and written.
        operations: operations, of all slices together.
        words: words of ids for a slice's owner; by vectors, of a bag.
        floats: numbers of the vectors from a slice's owner; by vectors, of a
            vector of each feature.
        bags: the most bags of a feature that is exchanged by vectors.
        hot_floats: numbers of an all-reduce for hot rows.
        keys: the most unique keys of a replica's copy.
    """

    memory: float
    lookups: float
    work: float
    operations: float
    words: int = 0
    floats: int = 0
    bags: int = 0
    hot_floats: int = 0
    keys: float = 0.0


def _work(
    demand: Demand, weights: Weights, ids: float, slices: int = 1
) -> float:
    """The weighted bytes that ids read and write, in one of the slices."""
    update = 2 * demand.state_bytes / demand.row_bytes
    moved = weights.byte * (_PASSES + update) * demand.row_bytes / slices
    return ids * (moved + weights.id_bytes)


def cost_of(demand: Demand, candidate: Candidate) -> Cost:
    """Returns what a table costs in a placement."""
    usage, row, hot = demand.usage, demand.row_bytes, demand.usage.hot
    ids, replicas = usage.ids, len(usage.owned)
    update = 2 * demand.state_bytes / row
    by_row, copy = WEIGHTS["row"], WEIGHTS["replicated"]
    if candidate.slices:
        # The owner gets the ids of all replicas. A table that is too narrow to
        # be cut has one slice of columns.
        slices, ids = candidate.slices, ids * replicas
        weights = WEIGHTS["table" if slices == 1 else "column"]
        return Cost(
            memory=demand.bytes // slices,
            lookups=ids,
            work=_work(demand, weights, ids, slices),
            operations=slices * weights.operations,
            words=sum(
                int(piece_words(f.most_bags, f.most_ids, int(f.ragged), 0))
                for f in usage.features
            ),
            floats=usage.most_bags * demand.dim // slices,
        )
    copied = copy.byte * row
    if candidate.placement == "replicated":
        # Each replica updates the unique rows of all.
        moved = _PASSES * ids + update * usage.unique * replicas
        return Cost(
            memory=demand.bytes,
            lookups=ids,
            work=copied * moved + copy.id_bytes * ids,
            operations=copy.operations,
            keys=usage.most_unique,
        )
    if candidate.hot and hot is not None:
        # Each replica updates the copies that any replica has looked up.
        updated = update * min(len(hot.ids), hot.unique * replicas)
        moved = _ALL_REDUCE_PASSES * len(hot.ids) + updated
        return Cost(
            memory=demand.hot_bytes,
            lookups=ids,
            work=_work(demand, by_row, ids) + copied * moved,
            operations=by_row.operations + copy.operations,
            hot_floats=hot_rows.num_floats(len(hot.ids), demand.dim),
        )
    features = demand.by_vectors
    vectors = sum(f.ids for f in features)
    bags = [f.most_bags for f in features]
    moved = replicas * sum(bags) * _VECTOR_PASSES * row
    return Cost(
        memory=0.0,
        lookups=ids,
        work=_work(demand, by_row, ids - vectors)
        + _work(demand, WEIGHTS["vectors"], vectors)
        + moved,
        operations=len(features) * WEIGHTS["vectors"].operations
        + (demand.share_by_rows > 0) * by_row.operations,
        words=sum(f.bag_size or 0 for f in features),
        floats=len(features) * demand.dim,
        bags=max(bags, default=0),
    )


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


def move_time(cost: Cost, demand: Demand, hardware: Hardware) -> float:
    """Seconds that one of a table's slices adds to its owner's step."""
    size = WORD * cost.words + 2 * demand.element * cost.floats
    sent = (len(demand.usage.owned) - 1) * size
    seconds = sent / hardware.inside_bandwidth
    if not hardware.shared:
        seconds += cost.work / hardware.memory_bandwidth
    return seconds
