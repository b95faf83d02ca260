"""The parts of a step's cost: tables by row, slices, and copies.

A part follows from its tables, and from the ranks of its slices. Most choices
of a search share parts with other choices, so parts are cached.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tfrs_embed.distribution import (
    bag_exchange,
    hot_rows,
    row_exchange,
    vector_exchange,
)
from tfrs_embed.distribution.exchange_kind import first_ranks
from tfrs_embed.distribution.traffic import Collective
from tfrs_embed.tools.planner import cost
from tfrs_embed.tools.planner.candidates import Demand
from tfrs_embed.tools.planner.traffic import Exchange, copies, longest_message

#: A member of `Slices`, and the ranks of its slices.
Owners = tuple[int, tuple[int, ...]]


class Part(NamedTuple):
    """The costs of some tables.

    Attributes:
        memory: bytes of tables and slots on each replica, [replicas] int64, or
            one number for all.
        lookups: rows, or slices of rows, that each replica reads, [replicas]
            float64, or one number for all.
        work: weighted bytes that each replica reads and writes, as `lookups`.
        operations: the number of operations of each replica.
        exchange: the collectives.
        sent: `exchange.passed_bytes`.
        rounds: `exchange.rounds`.
    """

    memory: Any
    lookups: Any
    work: Any
    operations: float
    exchange: Exchange
    sent: int
    rounds: int


class Loads(NamedTuple):
    """The loads of each rank's slices, each [replicas] float64.

    Attributes:
        memory: bytes of tables and slots.
        lookups: slices of rows that are read.
        work: weighted bytes that are read and written.
        words: words of ids in the message from each replica.
        floats: floats of vectors in the message to each replica.
    """

    memory: NDArray[np.float64]
    lookups: NDArray[np.float64]
    work: NDArray[np.float64]
    words: NDArray[np.float64]
    floats: NDArray[np.float64]


def _part(
    demands: Sequence[Demand],
    memory: Any,
    lookups: Any,
    work: Any,
    operations: float,
    messages: Sequence[Collective],
) -> Part:
    """Makes a part; on one replica there are no messages."""
    replicas = len(demands[0].usage.owned)
    exchange = Exchange(replicas, tuple(messages) if replicas > 1 else ())
    return Part(
        memory,
        lookups,
        work,
        operations,
        exchange,
        exchange.passed_bytes,
        exchange.rounds,
    )


class Rows:
    """Tables sharded by row.

    Of n tables, member i is table i, and member n + i is table i with copies of
    its hot rows.
    """

    def __init__(self, demands: Sequence[Demand]):
        self.demands = demands
        self.replicas = world = len(demands[0].usage.owned)
        members = 2 * len(demands)
        self.memory = np.zeros([members, world], np.int64)
        # The keys of each rank, twice: a window begins on any rank.
        owned = np.zeros([members, 2 * world])
        # Lookups, work and operations.
        self.costs = np.zeros([members, 3])
        # Bags, words of a bag, floats of a vector, floats of hot rows.
        self.vectors = np.zeros([members, 4], np.int64)
        # The width and the bytes of a number, of rows that are sent.
        self.kinds: list[tuple[int, int] | None] = [None] * members
        for i, demand in enumerate(demands):
            self._fill(i, demand, False)
            means = demand.share_by_rows * demand.usage.owned
            owned[i] = np.tile(means, 2)
            if demand.usage.hot is not None:
                self._fill(len(demands) + i, demand, True)
                owned[len(demands) + i] = np.tile(demand.usage.hot.owned, 2)
        self.windows = np.lib.stride_tricks.sliding_window_view(
            owned, world, axis=1
        )

    def _fill(self, member: int, demand: Demand, hot: bool) -> None:
        base, more = divmod(demand.rows, self.replicas)
        self.memory[member] = base * demand.state_bytes
        self.memory[member, :more] += demand.state_bytes
        work = cost.hot_work(demand) if hot else cost.row_work(demand)
        started = cost.row_operations(demand, hot)
        self.costs[member] = demand.usage.ids, work, started
        if hot:
            assert demand.usage.hot is not None
            self.memory[member] += demand.hot_bytes
            self.vectors[member, 3] = hot_rows.num_floats(
                len(demand.usage.hot.ids), demand.dim
            )
        else:
            self.vectors[member, :3] = (
                max((f.most_bags for f in demand.by_vectors), default=0),
                demand.bag_words,
                len(demand.by_vectors) * demand.dim,
            )
        if hot or demand.share_by_rows:
            self.kinds[member] = demand.dim, demand.number

    def part(self, members: tuple[int, ...]) -> Part:
        """Returns the part of members, in the order of tables."""
        each = list(members)
        lookups, work, started = self.costs[each].sum(0).tolist()
        *_, words, floats, hot = self.vectors[each].sum(0).tolist()
        bags = int(self.vectors[each, 0].max(initial=0))
        messages = self._messages(members)
        if bags:
            messages += vector_exchange.collectives(
                bags, words, floats, self.demands[0].element
            )
        messages += hot_rows.collectives(hot)
        return _part(
            self.demands,
            self.memory[each].sum(0),
            lookups,
            work,
            started,
            messages,
        )

    def _messages(self, members: tuple[int, ...]) -> list[Collective]:
        """The collectives for keys, rows and their gradients."""
        messages: list[Collective] = []
        kinds: dict[tuple[int, int], list[int]] = {}
        for position, member in enumerate(members):
            kind = self.kinds[member]
            if kind is not None:
                kinds.setdefault(kind, []).append(position)
        if not kinds:
            return messages
        world, number = self.replicas, len(self.demands)
        names = (self.demands[m % number].name for m in members)
        first = np.array(list(first_ranks(names, world).values()))
        order = list(itertools.chain.from_iterable(kinds.values()))
        counts = [len(positions) for positions in kinds.values()]
        means = np.add.reduceat(
            self.windows[np.array(members)[order], world - first[order]],
            np.cumsum([0, *counts[:-1]]),
        )
        # The ranks with the most keys decide; each gets `world` messages.
        high = means.max(1)
        owners = (means > 0.95 * high[:, None]).sum(1)
        for (dim, size), most, count in zip(
            kinds, high.tolist(), owners.tolist(), strict=True
        ):
            longest = longest_message(round(most, 3), count * world)
            element = self.demands[0].element
            messages += row_exchange.collectives(
                longest, dim, min(element, size), element
            )
        return messages


class Copies:
    """Replicated tables; member i is table i."""

    def __init__(self, demands: Sequence[Demand]):
        self.demands = demands
        self.works = [cost.copy_work(demand) for demand in demands]

    def part(self, members: tuple[int, ...]) -> Part:
        """Returns the part of members."""
        memory, lookups, work = 0, 0.0, 0.0
        keys: dict[int, float] = {}
        for i in members:
            demand = self.demands[i]
            memory += demand.bytes
            lookups += demand.usage.ids
            work += self.works[i]
            most = demand.usage.most_unique
            keys[demand.dim] = keys.get(demand.dim, 0.0) + most
        return _part(
            self.demands,
            memory,
            lookups,
            work,
            len(members) * cost.copy_operations(),
            copies(keys, self.demands[0].element),
        )


class Slices:
    """Whole tables and columns; a member is a table in a number of slices.

    Attributes:
        kinds: each member's table, by index, and number of slices.
    """

    def __init__(
        self, demands: Sequence[Demand], kinds: Iterable[tuple[int, int]]
    ):
        self.demands = demands
        self.replicas = world = len(demands[0].usage.owned)
        self.kinds = tuple(kinds)
        tables = [(demands[i], count) for i, count in self.kinds]
        self.counts = np.array([count for _, count in tables], np.int64)
        self.widths = [demand.dim // count for demand, count in tables]
        #: The load of one slice of each member, [loads, members].
        self.each = np.array(
            [
                (
                    demand.bytes // count,
                    demand.usage.ids * world,
                    cost.piece_work(demand, count, world),
                    demand.message_words,
                    cost.piece_floats(demand, count),
                )
                for demand, count in tables
            ]
        )
        self.each = self.each.reshape(-1, len(Loads._fields)).T.copy()
        operations = [cost.piece_operations(count) for _, count in tables]
        #: The mean load of a rank by all slices of a member; their operations.
        self.mean = np.vstack([self.each * self.counts / world, operations])
        # A bound's rounding must not put it above the true loads.
        self.mean[:-1] *= 1 - 1e-12

    def loads(self, owners: Sequence[Owners]) -> Loads:
        """Returns the loads of ranks with these slices."""
        members = [member for member, _ in owners]
        ranks = np.array([rank for _, ranks in owners for rank in ranks], int)
        each = np.repeat(self.each[:, members], self.counts[members], axis=1)
        number, world = len(Loads._fields), self.replicas
        places = np.arange(number)[:, None] * world + ranks
        sums = np.bincount(places.ravel(), each.ravel(), number * world)
        return Loads(*sums.reshape(number, world))

    def part(self, owners: Sequence[Owners]) -> Part:
        """Returns the part of slices, in the order of their tables."""
        if not owners:
            return self._part([], np.zeros([3, self.replicas]), 0.0, 0.0, 0.0)
        *loads, words, floats = self.loads(owners)
        members = [member for member, _ in owners]
        operations = float(self.mean[-1, members].sum())
        return self._part(members, loads, words.max(), floats.max(), operations)

    def least(self, members: Sequence[int]) -> Part:
        """Returns a lower bound of the part of members, for any owners."""
        if not members:
            return self.part(())
        chosen = list(members)
        *loads, words, floats, operations = self.mean[:, chosen].sum(1).tolist()
        most_words, most_floats = self.each[3:, chosen].max(1).tolist()
        return self._part(
            chosen,
            np.repeat(loads, self.replicas).reshape(-1, self.replicas),
            max(words, most_words),
            max(floats, most_floats),
            operations,
        )

    def _part(
        self,
        members: list[int],
        loads: Any,
        words: float,
        floats: float,
        operations: float,
    ) -> Part:
        messages: list[Collective] = []
        if members:
            unit = bag_exchange.unit_of(self.widths[m] for m in members)
            element = self.demands[0].element
            messages = bag_exchange.collectives(words, floats, unit, element)
        memory, lookups, work = loads
        return _part(
            self.demands,
            memory.astype(np.int64),
            lookups,
            work,
            operations,
            messages,
        )
