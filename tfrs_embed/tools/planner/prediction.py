"""The cost of a step: its time, messages and memory."""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tfrs_embed.configs.hardware import Hardware
from tfrs_embed.distribution import (
    bag_exchange,
    hot_rows,
    row_exchange,
    vector_exchange,
)
from tfrs_embed.distribution.exchange_kind import first_ranks
from tfrs_embed.distribution.traffic import Collective
from tfrs_embed.engines import data_parallel
from tfrs_embed.tools.planner.candidates import Candidate, Demand, candidates
from tfrs_embed.tools.planner.cost import (
    Cost,
    cost_of,
    move_time,
    transfer_time,
)
from tfrs_embed.tools.planner.traffic import StepTraffic, longest_message

# The columns of costs.
_BYTES, _LOOKUPS, _WORK, _OPERATIONS, _WORDS, _FLOATS, _BAGS, _HOT = range(8)


class StepTime(NamedTuple):
    """The four parts of a step's time, in seconds."""

    memory: float
    operations: float
    transfer: float
    latency: float


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """Placements of tables, and what a training step then costs.

    Attributes:
        choice: each table's option, as an index of `CostModel.options`.
        ranks: the ranks of the slices of each table that has some, by the
            table's index.
        memory: bytes of tables and slots on each replica, [replicas] int64.
        lookups: rows, or slices of rows, that each replica reads, [replicas].
        work: weighted bytes that each replica reads and writes, [replicas].
        exchange: the collectives.
        time: the time.
        excess: bytes above the limit, of all replicas together.
    """

    choice: tuple[int, ...]
    ranks: Mapping[int, tuple[int, ...]]
    memory: np.ndarray
    lookups: np.ndarray
    work: np.ndarray
    exchange: StepTraffic
    time: StepTime
    excess: int

    @property
    def seconds(self) -> float:
        """The predicted time."""
        return sum(self.time)

    @property
    def key(self) -> tuple[int, float]:
        """What is minimised: bytes above the limit, then seconds."""
        return self.excess, self.seconds

    @property
    def most(self) -> int:
        """The bytes of the replica that holds the most."""
        return int(self.memory.max())

    @property
    def imbalance(self) -> float:
        """The most work of a replica, over the mean; 1 without any work."""
        mean = float(self.work.mean())
        return float(self.work.max()) / mean if mean else 1.0


class CostModel:
    """Predicts steps of tables, of which a replica may hold `limit` bytes.

    A table in a placement is an option, with an index.

    Attributes:
        options: for each table, the index of each of its candidates.
        candidates: each option's candidate.
    """

    def __init__(
        self, demands: Sequence[Demand], hardware: Hardware, limit: int | None
    ):
        self.demands, self.hardware, self.limit = demands, hardware, limit
        self.replicas = world = len(demands[0].usage.owned)
        self._known: dict[tuple[int, ...], Step] = {}
        self.options: list[dict[Candidate, int]] = []
        self.candidates: list[Candidate] = []
        self._tables: list[int] = []
        self._costs: list[Cost] = []
        for i, demand in enumerate(demands):
            found, first = candidates(demand, world), len(self.candidates)
            self.options.append({c: first + k for k, c in enumerate(found)})
            self.candidates += found
            self._tables += [i] * len(found)
            self._costs += [cost_of(demand, each) for each in found]
        self._numbers = np.array(self._costs, float)[:, :8]
        self._slices = np.array([c.slices for c in self.candidates])
        self._moves = [
            move_time(cost, demands[i], hardware)
            for cost, i in zip(self._costs, self._tables, strict=True)
        ]
        # By row, the bytes and the mean number of keys of each rank, if row 0
        # is on rank 0, and the width and the bytes of a number of what is sent.
        self._memory = np.zeros([len(self._costs), world], np.int64)
        self._owned = np.zeros([len(self._costs), world])
        self._kinds: list[tuple[int, int] | None] = [None] * len(self._costs)
        for i, candidate in enumerate(self.candidates):
            demand = demands[self._tables[i]]
            if not candidate.slices:
                self._memory[i] = self._costs[i].memory
            if candidate.placement == "row":
                rows = (demand.rows + np.arange(world)[::-1]) // world
                self._memory[i] += rows * (demand.bytes // demand.rows)
                usage, share = demand.usage, demand.share_by_rows
                if candidate.hot and usage.hot is not None:
                    usage, share = usage.hot, 1.0  # type: ignore[assignment]
                self._owned[i] = share * usage.owned
                if share:
                    self._kinds[i] = demand.dim, demand.number

    @property
    def tried(self) -> int:
        """How many choices were predicted."""
        return len(self._known)

    def step(self, choice: Iterable[int]) -> Step:
        """Predicts a step, given an option of each table, in their order.

        Slices go to ranks by their seconds. If they don't fit then, the largest
        go first, by their seconds or, if this needs less memory, by their
        bytes.
        """
        options = tuple(choice)
        if options not in self._known:
            moves = self._moves
            sizes = [cost.memory for cost in self._costs]
            tried = []
            for order, loads in (moves, moves), (sizes, moves), (sizes, sizes):
                ranks = self._assign(options, order, loads)
                tried.append(self.step_on(options, ranks))
                if not (tried[-1].excess and ranks):
                    break
            found = min(tried, key=lambda step: step.key)
            self._known[options] = found
        return self._known[options]

    def _assign(
        self,
        choice: tuple[int, ...],
        order: Sequence[float],
        loads: Sequence[float],
    ) -> dict[int, tuple[int, ...]]:
        """Gives slices, the first in order, to the ranks with the least load.

        Of these, to those that have room; or else to those with most room.
        """
        sliced = [m for m in choice if self.candidates[m].slices]
        free = math.inf
        if self.limit is not None and sliced:
            # The first replica has the most rows of each table.
            free = self.limit - int(self._memory[list(choice), 0].sum())
        left = [free] * self.replicas
        heap = [(0.0, rank) for rank in range(self.replicas)]
        found = {}
        for member in sorted(sliced, key=order.__getitem__, reverse=True):
            size, load = self._costs[member].memory, loads[member]
            count = self.candidates[member].slices
            taken = [heapq.heappop(heap) for _ in range(count)]
            if any([left[rank] < size for _, rank in taken]):
                heap = sorted(
                    heap + taken,
                    key=lambda each: (-min(left[each[1]], size), *each),
                )
                taken, heap = heap[:count], heap[count:]
                heapq.heapify(heap)
            for before, rank in taken:
                left[rank] -= size
                heapq.heappush(heap, (before + load, rank))
            found[self._tables[member]] = tuple([rank for _, rank in taken])
        return dict(sorted(found.items()))

    def step_on(
        self, options: tuple[int, ...], ranks: Mapping[int, tuple[int, ...]]
    ) -> Step:
        """Predicts a step, given the ranks of slices by the table's index."""
        choice = list(options)
        world, hardware = self.replicas, self.hardware
        sliced = self._slices[choice] > 0
        numbers = self._numbers[choice]
        same = numbers[~sliced].sum(0)
        # The sums of slices' costs by rank.
        counts = [len(each) for each in ranks.values()]
        owners = np.array([r for each in ranks.values() for r in each], int)
        places = owners[:, None] * 8 + np.arange(8)
        slices = np.repeat(numbers[sliced], counts, axis=0)
        sums = np.bincount(places.ravel(), slices.ravel(), 8 * world)
        by_rank = sums.reshape(world, 8).T
        memory = self._memory[choice].sum(0) + by_rank[_BYTES].astype(np.int64)
        lookups, work = (
            same[_LOOKUPS:_OPERATIONS, None] + by_rank[_LOOKUPS:_OPERATIONS]
        )
        exchange = StepTraffic(
            world,
            tuple(self._messages(choice, numbers[~sliced], by_rank))
            if world > 1
            else (),
        )
        shared = numbers[:, _OPERATIONS].sum()
        busy = work
        if hardware.shared:
            # A host's replicas share its memory and cores.
            on_host = hardware.on_host(world)
            busy = np.add.reduceat(work, range(0, world, on_host))
            shared *= on_host
        time = StepTime(
            memory=float(busy.max()) / hardware.memory_bandwidth,
            operations=float(shared) * hardware.operation,
            transfer=transfer_time(exchange.passed_bytes, world, hardware),
            latency=exchange.collectives
            * hardware.levels(world)
            * hardware.latency
            + exchange.rounds * (world - 1) * hardware.message,
        )
        excess = 0
        if self.limit is not None:
            excess = int((memory - self.limit).clip(0).sum())
        return Step(
            options, ranks, memory, lookups, work, exchange, time, excess
        )

    def _messages(
        self, choice: Sequence[int], whole: np.ndarray, slices: np.ndarray
    ) -> list[Collective]:
        """The collectives, but for the consensus on ids."""
        element = self.demands[0].element
        messages = self._row_messages(choice)
        *_, words, floats, _, hot = map(int, whole.sum(0))
        if bags := int(whole[:, _BAGS].max(initial=0)):
            messages += vector_exchange.collectives(
                bags, words, floats, element
            )
        messages += hot_rows.collectives(hot)
        cut = {
            self.demands[self._tables[m]].dim // self.candidates[m].slices
            for m in choice
            if self.candidates[m].slices
        }
        if cut:
            messages += bag_exchange.collectives(
                slices[_WORDS].max(),
                slices[_FLOATS].max(),
                bag_exchange.unit_of(cut),
                element,
            )
        keys: dict[int, float] = {}
        for m in choice:
            if self.candidates[m].placement == "replicated":
                dim = self.demands[self._tables[m]].dim
                keys[dim] = keys.get(dim, 0.0) + self._costs[m].keys
        return messages + data_parallel.collectives(keys, element)

    def _row_messages(self, choice: Sequence[int]) -> list[Collective]:
        """The collectives for keys, rows and their gradients."""
        rows = [m for m in choice if self.candidates[m].placement == "row"]
        world, element = self.replicas, self.demands[0].element
        names = [self.demands[self._tables[m]].name for m in rows]
        # Row 0 of each table is on its first rank.
        first = np.array([*first_ranks(names, world).values()], int)
        ranks = (np.arange(world) - first[:, None]) % world
        owned = np.take_along_axis(self._owned[rows], ranks, 1)
        kinds: dict[tuple[int, int], list[int]] = {}
        for i, m in enumerate(rows):
            if kind := self._kinds[m]:
                kinds.setdefault(kind, []).append(i)
        messages: list[Collective] = []
        for (dim, size), members in kinds.items():
            means = owned[members].sum(0)
            # The ranks with the most keys decide; each gets `world` messages.
            most = float(means.max())
            owners = int((means > 0.95 * most).sum())
            longest = longest_message(round(most, 3), owners * world)
            messages += row_exchange.collectives(
                longest, dim, min(element, size), element
            )
        return messages
