"""The search for the placements of the least predicted time.

A choice is a candidate for each table; the owners of slices follow from it. An
engine's collectives cost the same for one table as for many, so each set of
placements is searched by itself. A search begins with the best candidate of
each table, and makes moves that lower the time: of one table, or of all tables
of one width and placement. There are no random numbers: equal demands have
equal results.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from tfrs_embed.configs.hardware import Hardware
from tfrs_embed.configs.plan import PLACEMENTS
from tfrs_embed.tools.planner.candidates import Candidate, Demand, candidates
from tfrs_embed.tools.planner.cost import move_time
from tfrs_embed.tools.planner.parts import Copies, Owners, Part, Rows, Slices
from tfrs_embed.tools.planner.prediction import Prediction, predict, step_time

T = TypeVar("T")
#: For each table, the index of its candidate in `Search.options`.
Choice = tuple[int, ...]
_EXHAUSTIVE = 700  # Of up to so many choices all are tried.
_MOST_KEPT = 3 * 10**6  # The parts that are cached, times the replicas.
_MOST_SWAPS = 4000  # Of up to so many moves of slices all are tried.


class Found(NamedTuple):
    """A choice, the owners of its slices, and the cost of a step.

    Attributes:
        search: the search that found the choice.
        choice: the choice.
        owners: the owners of slices, in the order of the tables.
        most: bytes of tables and slots of the replica that holds the most.
        excess: bytes above the limit, of all replicas together.
        seconds: the predicted time of a step.
    """

    search: Search
    choice: Choice
    owners: tuple[Owners, ...]
    most: int
    excess: int
    seconds: float

    @property
    def key(self) -> tuple[int, float]:
        """Objective, minimised: bytes above the limit, then seconds."""
        return self.excess, self.seconds

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Each table's candidate."""
        options = self.search.options
        return tuple(o[c] for o, c in zip(options, self.choice, strict=True))

    @property
    def ranks(self) -> dict[int, tuple[int, ...]]:
        """The ranks of each table's slices, by the table's index."""
        kinds = self.search.slices.kinds
        return {kinds[member][0]: ranks for member, ranks in self.owners}

    @property
    def prediction(self) -> Prediction:
        """The cost of a step."""
        rows, copies, _ = self.search.parts(self.choice)
        slices = self.search.slices.part(self.owners)
        return predict(self.search.hardware, rows, slices, copies)


def best_of(choices: Iterable[Found]) -> Found:
    """Returns the choice of the least key."""
    return min(choices, key=lambda each: each.key)


#: The owners of slices, and their part.
_Placed = tuple[tuple[Owners, ...], Part]


class Search:
    """Searches placements where a replica holds at most `limit` bytes."""

    def __init__(
        self, demands: Sequence[Demand], hardware: Hardware, limit: int | None
    ):
        self.demands = tuple(demands)
        self.hardware = hardware
        self.limit = limit
        self.replicas = len(demands[0].usage.owned)
        self.options = [candidates(d, self.replicas) for d in demands]
        # Each candidate's part (0: rows, 1: copies, 2: slices) and its member.
        self._members: list[list[tuple[int, int]]] = []
        slices: list[tuple[int, int]] = []
        for i, options in enumerate(self.options):
            members = []
            for each in options:
                if each.slices:
                    members.append((2, len(slices)))
                    slices.append((i, each.slices))
                elif each.placement == "row":
                    members.append((0, i + each.hot * len(demands)))
                else:
                    members.append((1, i))
            self._members.append(members)
        self.slices = Slices(demands, slices)
        keep = functools.lru_cache(max(1000, _MOST_KEPT // self.replicas))
        self._rows: Callable[[tuple[int, ...]], Part]
        self._rows = keep(Rows(demands).part)
        self._copies: Callable[[tuple[int, ...]], Part]
        self._copies = keep(Copies(demands).part)
        # Each member's slices, and a slice's bytes and seconds.
        self._pieces = [
            (
                count,
                self.demands[i].bytes // count,
                move_time(self.demands[i], count, hardware),
            )
            for i, count in slices
        ]
        self._placed = keep(self._new_placed)
        self._found: dict[Choice, Found] = {}

    def evaluate(self, choice: Choice) -> Found:
        """Gives the slices of a choice to ranks, and predicts its cost."""
        found = self._found.get(choice)
        if found is not None:
            return found
        rows, copies, slices = self.parts(choice)
        free = None
        if self.limit is not None:
            # The first replica has the most rows of each table.
            free = self.limit - int(rows.memory[0]) - copies.memory
        tried: list[Found] = []
        for weight in (2, 1):  # Slices' seconds, then bytes.
            owners, part = self._placed(slices, weight, free)
            tried.append(self._found_at(choice, rows, owners, part, copies))
            if not tried[-1].excess:
                break
        self._found[choice] = found = best_of(tried)
        return found

    def parts(self, choice: Choice) -> tuple[Part, Part, tuple[int, ...]]:
        """The parts of rows and of copies, and the members of `Slices`."""
        members: tuple[list[int], ...] = [], [], []
        for of_table, i in zip(self._members, choice, strict=True):
            kind, member = of_table[i]
            members[kind].append(member)
        rows, copies, slices = map(tuple, members)
        return self._rows(rows), self._copies(copies), slices

    def fits(self, found: Found) -> bool:
        """Whether no replica holds more than the limit."""
        return self.limit is None or found.most <= self.limit

    def best(self, allowed: Collection[str] = PLACEMENTS) -> Found:
        """Finds the fastest choice that fits, else the one nearest to fitting.

        `allowed` are the placements of tables that have none of their own. A
        table that can have none of these is on one replica.
        """
        options = self._allowed(allowed)
        if math.prod(map(len, options)) <= _EXHAUSTIVE:
            choices = itertools.product(*options)
            return best_of(map(self.evaluate, choices))
        # The placements of each engine.
        engines: list[set[str]] = [{"row"}, {"table", "column"}, {"replicated"}]
        usable = [names for e in engines if (names := e & set(allowed))]
        results = [
            self._improve(self._allowed(set().union(*each)))
            for count in range(1, len(usable) + 1)
            for each in itertools.combinations(usable, count)
        ]
        return self._improve(options, best_of(results).choice)

    def _allowed(self, allowed: Collection[str]) -> list[tuple[int, ...]]:
        """Each table's candidates of these placements, by index."""
        return [
            tuple(
                i
                for i, c in enumerate(options)
                if demand.kept is not None or c.placement in allowed
            )
            or (0,)
            for demand, options in zip(self.demands, self.options, strict=True)
        ]

    def _improve(
        self, options: Sequence[Sequence[int]], start: Choice | None = None
    ) -> Found:
        """Makes moves that lower the key, until no move does."""
        found = self.evaluate(start or self._greedy(options))

        def better(choice: Choice) -> bool:
            """Takes a choice if it is better; returns whether it is."""
            nonlocal found
            other = self.evaluate(choice)
            if other.key >= found.key:
                return False
            found = other
            return True

        while any(map(better, self._moves(found.choice, options))):
            # Try each single table, in order, before all moves again.
            for i, each in enumerate(options):
                for candidate in each:
                    better(_with(found.choice, i, candidate))
        return found

    @functools.cached_property
    def _alone(self) -> list[list[tuple[int, float]]]:
        """The key of each candidate of each table, without other tables."""
        found = []
        for demand, options in zip(self.demands, self.options, strict=True):
            search = Search([demand], self.hardware, self.limit)
            found.append(
                [search.evaluate((i,)).key for i in range(len(options))]
            )
        return found

    def _greedy(self, options: Sequence[Sequence[int]]) -> Choice:
        """The best candidate of each table, without other tables."""
        return tuple(
            min(each, key=keys.__getitem__)
            for keys, each in zip(self._alone, options, strict=True)
        )

    def _moves(
        self, choice: Choice, options: Sequence[Sequence[int]]
    ) -> Iterator[Choice]:
        """Other candidates for a table, or for all of a width and placement."""
        for i, each in enumerate(options):
            for candidate in each:
                if candidate != choice[i]:
                    yield _with(choice, i, candidate)
        groups: dict[tuple[int, str], list[int]] = {}
        for i, candidate in enumerate(choice):
            key = self.demands[i].dim, self.options[i][candidate].placement
            groups.setdefault(key, []).append(i)
        for members in groups.values():
            indices = [
                {self.options[i][c]: c for c in options[i]} for i in members
            ]
            for common in sorted(set.intersection(*map(set, indices))):
                changed = list(choice)
                for i, by_candidate in zip(members, indices, strict=True):
                    changed[i] = by_candidate[common]
                yield tuple(changed)

    def _found_at(
        self,
        choice: Choice,
        rows: Part,
        owners: tuple[Owners, ...],
        slices: Part,
        copies: Part,
    ) -> Found:
        parts = rows, slices, copies
        memory = sum(part.memory for part in parts)
        most, excess = int(memory.max()), 0
        if self.limit is not None and most > self.limit:
            excess = int((memory - self.limit).clip(0).sum())
        seconds = step_time(self.hardware, *parts).seconds
        return Found(self, choice, owners, most, excess, seconds)

    def _new_placed(
        self, slices: tuple[int, ...], weight: int, free: int | None
    ) -> _Placed:
        """Gives slices, the heaviest first, to the ranks with the least load.

        `weight` is the index of a slice's weight in `_pieces`; each rank has
        `free` bytes for slices, or any number.
        """
        left = [0 if free is None else free] * self.replicas
        owned: dict[int, tuple[int, ...]] = {}
        ranks = [(0.0, rank) for rank in range(self.replicas)]  # In order.
        weights = [float(piece[weight]) for piece in self._pieces]
        for member in sorted(slices, key=weights.__getitem__, reverse=True):
            count, size, _ = self._pieces[member]
            taken = ranks[:count]
            if free is None or all([left[r] >= size for _, r in taken]):
                del ranks[:count]
            else:
                room = [each for each in ranks if left[each[1]] >= size]
                full = [each for each in ranks if left[each[1]] < size]
                # Without room, slices go where most bytes are free.
                full.sort(key=lambda each: (-left[each[1]], each[1]))
                taken = (room + full)[:count]
                ranks = sorted((room + full)[count:])
            for load, rank in taken:
                bisect.insort(ranks, (load + weights[member], rank))
                left[rank] -= size
            owned[member] = tuple([rank for _, rank in taken])
        owners = tuple([(member, owned[member]) for member in slices])
        return owners, self.slices.part(owners)

    def move_owners(self, found: Found) -> Found:
        """Moves slices to other ranks while this lowers the key.

        Where there are too many slices and ranks, `found` is returned.
        """
        count = sum(len(ranks) for _, ranks in found.owners)
        if count * (self.replicas + count) > _MOST_SWAPS:
            return found
        rows, copies, _ = self.parts(found.choice)
        while True:
            for owners in _other_owners(found.owners, self.replicas):
                part = self.slices.part(owners)
                other = self._found_at(found.choice, rows, owners, part, copies)
                if other.key < found.key:
                    found = other
                    break
            else:
                return found


def _with(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    return (*values[:index], value, *values[index + 1 :])


def _other_owners(
    owners: tuple[Owners, ...], replicas: int
) -> Iterator[tuple[Owners, ...]]:
    """Yields owners with one slice moved to another rank, or two exchanged."""

    def put(
        owners: tuple[Owners, ...], i: int, j: int, rank: int
    ) -> tuple[Owners, ...]:
        member, ranks = owners[i]
        return _with(owners, i, (member, _with(ranks, j, rank)))

    slices = [
        (i, j) for i, (_, ranks) in enumerate(owners) for j in range(len(ranks))
    ]
    for i, j in slices:
        ranks = owners[i][1]
        for rank in range(replicas):
            if rank not in ranks:
                yield put(owners, i, j, rank)
    for (i, j), (k, m) in itertools.combinations(slices, 2):
        mine, other = owners[i][1][j], owners[k][1][m]
        if other not in owners[i][1] and mine not in owners[k][1]:
            yield put(put(owners, i, j, other), k, m, mine)
