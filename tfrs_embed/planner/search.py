"""The search for the placements of the least predicted time.

A choice is a candidate for each table; owners of slices follow from it. An
engine's collectives cost the same whether it holds one table or all, so that
each set of placements is searched by itself: from the best candidate of each
table by moves that lower the time, of one table, and of all tables of one width
and placement. There are no random numbers: one demand has one result.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from tfrs_embed.planner.candidates import (
    PLACEMENTS,
    Candidate,
    Demand,
    candidates,
)
from tfrs_embed.planner.cost import Prediction, move_time, predict
from tfrs_embed.planner.hardware import Hardware
from tfrs_embed.planner.traffic import Place

Choice = tuple[Candidate, ...]
# Up to so many choices, and so many evaluations of owners, all are looked at.
_EXHAUSTIVE = 700
_MOST_SWAPS = 4000


class Found(NamedTuple):
    """A choice, the places that follow, and what a step costs with them."""

    choice: Choice
    places: tuple[Place, ...]
    prediction: Prediction
    excess: int

    @property
    def key(self) -> tuple[int, float]:
        """What is to be low: bytes above the limit, then seconds."""
        return self.excess, self.prediction.time.seconds


class Search:
    """Searches placements for tables."""

    def __init__(
        self,
        demands: Sequence[Demand],
        hardware: Hardware,
        limit: int | None,
    ):
        """Keeps what to search for.

        Args:
            demands: the tables.
            hardware: what the replicas run on.
            limit: bytes of tables and slots that a replica may hold; None: any.
        """
        self.demands = tuple(demands)
        self.hardware = hardware
        self.limit = limit
        self.replicas = len(demands[0].usage.owned)
        self.options = [candidates(d, self.replicas) for d in demands]
        self._found: dict[Choice, Found] = {}

    def evaluate(self, choice: Choice) -> Found:
        """Places the slices of a choice, and predicts its cost."""
        found = self._found.get(choice)
        if found is None:
            places = self._own(choice, self._weigh_time)
            found = self._found_at(choice, places)
            if found.excess:
                places = self._own(choice, self._weigh_bytes)
                by_bytes = self._found_at(choice, places)
                found = min(found, by_bytes, key=lambda each: each.key)
            self._found[choice] = found
        return found

    def fits(self, found: Found) -> bool:
        """Whether no replica holds more than the limit."""
        most = int(found.prediction.memory.max())
        return self.limit is None or most <= self.limit

    def best(self, allowed: Sequence[str] = PLACEMENTS) -> Found:
        """The best choice.

        Args:
            allowed: the placements that tables may have whose placement is not
                kept. A table that can have none of them is on one replica.

        Returns:
            The best that was found. Where nothing that was found fits, it
            exceeds the limit the least.
        """
        options = self._allowed(allowed)
        combinations = 1
        for each in options:
            combinations *= len(each)
        if combinations <= _EXHAUSTIVE:
            choices = itertools.product(*options)
            return min(map(self.evaluate, choices), key=lambda each: each.key)
        results = []
        kinds = [
            tuple(k) for k in (["row"], ["table", "column"], ["replicated"])
        ]
        usable = [k for k in kinds if set(k) & set(allowed)]
        for count in range(1, len(usable) + 1):
            for engines in itertools.combinations(usable, count):
                names = {name for k in engines for name in k} & set(allowed)
                results.append(self._improve(self._allowed(tuple(names))))
        best = min(results, key=lambda each: each.key)
        # Once more with all of them.
        return self._improve(options, best.choice)

    def tightest(self) -> Found:
        """The choice that was found with the least memory of any replica."""
        search = Search(self.demands, self.hardware, 0)
        # The fullest replica decides, not the sum of what exceeds.
        key: Callable[[Found], tuple[int, float]] = lambda each: (  # noqa: E731
            int(each.prediction.memory.max()),
            each.prediction.time.seconds,
        )
        options = search.options
        starts = [
            tuple(self._least(o, name) for o in options)
            for name in ("row", "table", "column")
        ]
        return min(
            (search._improve(options, start, key) for start in starts), key=key
        )

    def best_from_tightest(self) -> Found:
        """The best near the choice with the least memory.

        It may fit where nothing that `best` found does.
        """
        return self._improve(self.options, self.tightest().choice)

    @staticmethod
    def _least(options: Sequence[Candidate], placement: str) -> Candidate:
        return next(
            (c for c in options if c.placement == placement), options[0]
        )

    def _allowed(self, allowed: Sequence[str]) -> list[tuple[Candidate, ...]]:
        return [
            options
            if demand.kept is not None
            else tuple(c for c in options if c.placement in allowed)
            or options[:1]
            for demand, options in zip(self.demands, self.options, strict=True)
        ]

    def _improve(
        self,
        options: Sequence[Sequence[Candidate]],
        start: Choice | None = None,
        key: Callable[[Found], tuple[int, float]] = lambda each: each.key,
    ) -> Found:
        """Makes moves that lower the key, until there are none."""
        found = self.evaluate(start or self._greedy(options))
        better = True
        while better:
            better = False
            for choice in self._moves(found.choice, options):
                next_one = self.evaluate(choice)
                if key(next_one) < key(found):
                    found, better = next_one, True
                    break
            else:
                continue
            # Go on with single tables, in order, before all moves again.
            for i, each in enumerate(options):
                for candidate in each:
                    choice = _with(found.choice, [i], candidate)
                    next_one = self.evaluate(choice)
                    if key(next_one) < key(found):
                        found = next_one
        return found

    def _greedy(self, options: Sequence[Sequence[Candidate]]) -> Choice:
        """The best candidate of each table, as if it were alone."""
        choice = []
        for demand, each in zip(self.demands, options, strict=True):
            alone = Search([demand], self.hardware, self.limit)
            choice.append(
                min(each, key=lambda c, alone=alone: alone.evaluate((c,)).key)  # type: ignore[misc]
            )
        return tuple(choice)

    def _moves(
        self, choice: Choice, options: Sequence[Sequence[Candidate]]
    ) -> Iterator[Choice]:
        """Choices near one.

        One table has another candidate, or all of one width and placement.
        """
        for i, each in enumerate(options):
            for candidate in each:
                if candidate != choice[i]:
                    yield _with(choice, [i], candidate)
        groups: dict[tuple[int, str], list[int]] = {}
        for i, candidate in enumerate(choice):
            key = self.demands[i].dim, candidate.placement
            groups.setdefault(key, []).append(i)
        for members in groups.values():
            common = set.intersection(*(set(options[i]) for i in members))
            for candidate in sorted(common):
                yield _with(choice, members, candidate)

    def _found_at(self, choice: Choice, places: tuple[Place, ...]) -> Found:
        prediction = predict(self.demands, places, self.hardware)
        excess = 0
        if self.limit is not None:
            excess = int((prediction.memory - self.limit).clip(0).sum())
        return Found(choice, places, prediction, excess)

    def _weigh_time(self, demand: Demand, slices: int) -> float:
        return move_time(demand, slices, self.hardware)

    @staticmethod
    def _weigh_bytes(demand: Demand, slices: int) -> float:
        return demand.bytes // slices

    def _own(
        self, choice: Choice, weigh: Callable[[Demand, int], float]
    ) -> tuple[Place, ...]:
        """Gives slices to ranks: the heaviest first, to those with the least.

        Args:
            choice: the choice.
            weigh: a slice's weight, given its table and the number of slices.

        Returns:
            Each table's place.
        """
        places = [
            Place(c.placement, (), d.usage.hot.ids if c.hot else ())  # type: ignore[union-attr]
            for c, d in zip(choice, self.demands, strict=True)
        ]
        free = None
        if self.limit is not None:
            used = 0
            for demand, candidate in zip(self.demands, choice, strict=True):
                if candidate.placement == "row":
                    of_row = demand.bytes // demand.rows
                    used += -(-demand.rows // self.replicas) * of_row
                    used += demand.hot_bytes * candidate.hot
                elif candidate.placement == "replicated":
                    used += demand.bytes
            free = [self.limit - used] * self.replicas
        weights = {
            i: weigh(self.demands[i], candidate.slices)
            for i, candidate in enumerate(choice)
            if candidate.slices
        }
        ranks = [(0.0, rank) for rank in range(self.replicas)]  # A heap.
        for i in sorted(weights, key=lambda i: (-weights[i], i)):
            slices = choice[i].slices
            size = self.demands[i].bytes // slices
            taken: list[tuple[float, int]] = []
            full: list[tuple[float, int]] = []
            while ranks and len(taken) < slices:
                each = heapq.heappop(ranks)
                fits = free is None or free[each[1]] >= size
                (taken if fits else full).append(each)
            if len(taken) < slices:
                # Nowhere to go: where most is free.
                full.sort(key=lambda each: (-free[each[1]], each[1]))  # type: ignore[index]
                missing = slices - len(taken)
                taken += full[:missing]
                full = full[missing:]
            for each in full:
                heapq.heappush(ranks, each)
            for load, rank in taken:
                heapq.heappush(ranks, (load + weights[i], rank))
                if free is not None:
                    free[rank] -= size
            places[i] = Place(
                choice[i].placement, tuple(rank for _, rank in taken)
            )
        return tuple(places)

    def move_owners(self, found: Found) -> Found:
        """Moves slices to other ranks, while that lowers the time.

        Args:
            found: where they are. Of many slices and ranks it is left as it is.

        Returns:
            What is no worse.
        """
        slices = [
            (i, j)
            for i, place in enumerate(found.places)
            for j in range(len(place.ranks))
        ]
        trials = len(slices) * (self.replicas + len(slices))
        if trials > _MOST_SWAPS:
            return found
        better = True
        while better:
            better = False
            for places in _other_owners(found.places, slices, self.replicas):
                next_one = self._found_at(found.choice, places)
                if next_one.key < found.key:
                    found, better = next_one, True
                    break
        return found


def _with(
    choice: Choice, members: Sequence[int], candidate: Candidate
) -> Choice:
    changed = list(choice)
    for i in members:
        changed[i] = candidate
    return tuple(changed)


def _other_owners(
    places: tuple[Place, ...], slices: Sequence[tuple[int, int]], replicas: int
) -> Iterator[tuple[Place, ...]]:
    """Places with one slice on another rank, or two exchanged."""

    def put(
        places: tuple[Place, ...], i: int, j: int, rank: int
    ) -> tuple[Place, ...]:
        ranks = list(places[i].ranks)
        ranks[j] = rank
        place = Place(places[i].placement, tuple(ranks))
        return (*places[:i], place, *places[i + 1 :])

    for i, j in slices:
        for rank in range(replicas):
            if rank not in places[i].ranks:
                yield put(places, i, j, rank)
    for (i, j), (k, m) in itertools.combinations(slices, 2):
        mine, other = places[i].ranks[j], places[k].ranks[m]
        if other not in places[i].ranks and mine not in places[k].ranks:
            yield put(put(places, i, j, other), k, m, mine)
