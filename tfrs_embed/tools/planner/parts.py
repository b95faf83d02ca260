"""The parts of a step's cost: tables by row, slices, and copies.

A part follows from its tables, and from the ranks of its slices. Most choices
of a search share parts with other choices, so parts are cached.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfrs_embed.distribution import (
    bag_exchange,
    hot_rows,
    row_exchange,
    vector_exchange,
)
from tfrs_embed.distribution.exchange_kind import first_ranks
from tfrs_embed.distribution.traffic import Collective
from tfrs_embed.engines import data_parallel
from tfrs_embed.tools.planner import cost
from tfrs_embed.tools.planner.candidates import Demand
from tfrs_embed.tools.planner.traffic import Exchange, longest_message

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
        disk_pages: pages that each replica's disk reads and writes, as
            `lookups`.
    """

    memory: Any
    lookups: Any
    work: Any
    operations: float
    exchange: Exchange
    disk_pages: Any


class _Tables:
    """Some tables, on replicas that send numbers of `element` bytes."""

    def __init__(self, demands: Sequence[Demand]):
        self.demands = demands
        self.replicas = len(demands[0].usage.owned)
        self.element = demands[0].element

    def _exchange(self, messages: Sequence[Collective]) -> Exchange:
        """The exchange; there are no messages on one replica."""
        found = tuple(messages) if self.replicas > 1 else ()
        return Exchange(self.replicas, found)


class Rows(_Tables):
    """Tables sharded by row.

    Of n tables, member i is table i, and member n + i is table i with copies of
    its hot rows.
    """

    def __init__(self, demands: Sequence[Demand]):
        super().__init__(demands)
        members = 2 * len(demands)
        self.memory = np.zeros([members, self.replicas], np.int64)
        # The mean number of keys of each rank, if row 0 is on rank 0.
        self.owned = np.zeros([members, self.replicas])
        # Lookups, work, operations, pages of the disk.
        self.costs = np.zeros([members, 4])
        # Bags, words of a bag, floats of a vector, floats of hot rows.
        self.vectors = np.zeros([members, 4], np.int64)
        # The width and the bytes of a number, of rows that are sent.
        self.kinds: list[tuple[int, int] | None] = [None] * members
        for i, demand in enumerate(demands):
            usage, kind = demand.usage, (demand.dim, demand.number)
            base, more = divmod(demand.rows, self.replicas)
            in_memory = demand.bytes // demand.rows
            memory = np.full(self.replicas, base * in_memory)
            memory[:more] += in_memory
            self.memory[i] = memory
            self.owned[i] = demand.share_by_rows * usage.owned
            pages = demand.disk_pages
            self.costs[i] = usage.ids, *cost.of_rows(demand), pages
            self.vectors[i, :3] = (
                max((f.most_bags for f in demand.by_vectors), default=0),
                demand.bag_words,
                len(demand.by_vectors) * demand.dim,
            )
            if demand.share_by_rows:
                self.kinds[i] = kind
            if usage.hot is not None:
                member = len(demands) + i
                self.memory[member] = memory + demand.hot_bytes
                self.owned[member] = usage.hot.owned
                hot_cost = cost.of_hot_rows(demand)
                self.costs[member] = usage.ids, *hot_cost, pages
                self.vectors[member, 3] = hot_rows.num_floats(
                    len(usage.hot.ids), demand.dim
                )
                self.kinds[member] = kind

    def part(self, members: tuple[int, ...]) -> Part:
        """Returns the part of members, in the order of tables."""
        each = list(members)
        lookups, work, operations, pages = self.costs[each].sum(0).tolist()
        *_, words, floats, hot = self.vectors[each].sum(0).tolist()
        bags = int(self.vectors[each, 0].max(initial=0))
        messages = self._messages(members)
        if bags:
            messages += vector_exchange.collectives(
                bags, words, floats, self.element
            )
        messages += hot_rows.collectives(hot)
        memory = self.memory[each].sum(0)
        exchange = self._exchange(messages)
        return Part(memory, lookups, work, operations, exchange, pages)

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
        # Row 0 of each table is on its first rank.
        ranks = (np.arange(world) - first[order][:, None]) % world
        means = np.add.reduceat(
            self.owned[np.array(members)[order][:, None], ranks],
            np.cumsum([0, *counts[:-1]]),
        )
        # The ranks with the most keys decide; each gets `world` messages.
        high = means.max(1)
        owners = (means > 0.95 * high[:, None]).sum(1)
        for (dim, size), most, count in zip(
            kinds, high.tolist(), owners.tolist(), strict=True
        ):
            longest = longest_message(round(most, 3), count * world)
            messages += row_exchange.collectives(
                longest, dim, min(self.element, size), self.element
            )
        return messages


class Copies(_Tables):
    """Replicated tables; member i is table i."""

    def __init__(self, demands: Sequence[Demand]):
        super().__init__(demands)
        self.costs = [cost.of_copy(demand) for demand in demands]

    def part(self, members: tuple[int, ...]) -> Part:
        """Returns the part of members."""
        memory, lookups, work, operations, pages = 0, 0.0, 0.0, 0.0, 0.0
        keys: dict[int, float] = {}
        for i in members:
            demand = self.demands[i]
            memory += demand.bytes
            lookups += demand.usage.ids
            work += self.costs[i][0]
            operations += self.costs[i][1]
            # Each replica updates the unique rows of all.
            pages += demand.disk_pages * self.replicas
            most = demand.usage.most_unique
            keys[demand.dim] = keys.get(demand.dim, 0.0) + most
        exchange = self._exchange(data_parallel.collectives(keys, self.element))
        return Part(memory, lookups, work, operations, exchange, pages)


class Slices(_Tables):
    """Whole tables and columns; a member is a table in a number of slices.

    Attributes:
        kinds: each member's table, by index, and number of slices.
    """

    def __init__(
        self, demands: Sequence[Demand], kinds: Iterable[tuple[int, int]]
    ):
        super().__init__(demands)
        self.kinds = tuple(kinds)
        tables = [(demands[i], count) for i, count in self.kinds]
        self.counts = np.array([count for _, count in tables], np.int64)
        self.widths = [demand.dim // count for demand, count in tables]
        costs = [cost.of_slice(demand, count) for demand, count in tables]
        # The loads of a rank by one slice of each member, [6, members]: bytes,
        # lookups, work, pages of the disk; words and floats of messages from
        # and to a replica.
        loads = [
            (
                demand.bytes // count,
                demand.usage.ids * self.replicas,
                work,
                demand.disk_pages * self.replicas,
                demand.message_words,
                cost.slice_floats(demand, count),
            )
            for (demand, count), (work, _) in zip(tables, costs, strict=True)
        ]
        self.loads = np.array(loads).reshape(-1, 6).T.copy()
        self.operations = np.array([operations for _, operations in costs])

    def part(self, owners: Sequence[Owners]) -> Part:
        """Returns the part of slices, in the order of their tables."""
        members = [member for member, _ in owners]
        ranks = np.array([rank for _, ranks in owners for rank in ranks], int)
        each = np.repeat(self.loads[:, members], self.counts[members], axis=1)
        # Sums each load by rank.
        places = np.arange(6)[:, None] * self.replicas + ranks
        sums = np.bincount(places.ravel(), each.ravel(), 6 * self.replicas)
        *loads, words, floats = sums.reshape(6, self.replicas)
        messages: list[Collective] = []
        if members:
            unit = bag_exchange.unit_of(self.widths[m] for m in members)
            messages = bag_exchange.collectives(
                words.max(), floats.max(), unit, self.element
            )
        memory, lookups, work, pages = loads
        operations = float(self.operations[members].sum())
        exchange = self._exchange(messages)
        return Part(
            memory.astype(np.int64), lookups, work, operations, exchange, pages
        )
