"""What a step costs with each table in its place."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from tfrs_embed.configs.hardware import Hardware
from tfrs_embed.tools.planner import cost
from tfrs_embed.tools.planner.candidates import Demand
from tfrs_embed.tools.planner.cost import StepTime
from tfrs_embed.tools.planner.parts import Copies, Part, Rows, Slices
from tfrs_embed.tools.planner.traffic import Exchange, Place

# Numbers of the parts that are kept: one has up to three for each replica.
_MOST_KEPT = 10**7


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


class Model:
    """The costs of given tables on given hardware, each part computed once.

    Attributes:
        demands: the tables.
        hardware: what the replicas run on.
        replicas: the number of replicas.
        on_host: the number of replicas that share memory and cores.
        slices: what `Slices` has of whole tables and columns.
        kept: how many parts of each kind are kept.
        rows: the part of tables sharded by row, given `Rows`' members.
        copies: the part of replicated tables, given `Copies`' members.
        least_slices: the least part of slices, given `Slices`' members.
    """

    def __init__(
        self,
        demands: Sequence[Demand],
        hardware: Hardware,
        slices: Iterable[tuple[int, int]],
    ):
        """Computes the costs of each table in each placement.

        Args:
            demands: the tables.
            hardware: what the replicas run on.
            slices: the index of a table, and a number of slices that it may
                have; all that are asked for.
        """
        self.demands = tuple(demands)
        self.hardware = hardware
        self.replicas = len(demands[0].usage.owned)
        self.on_host = 1
        if hardware.shared:
            self.on_host = hardware.on_host(self.replicas)
        self._starts = range(0, self.replicas, self.on_host)
        self.slices = Slices(self.demands, slices)
        self.kept = max(1000, _MOST_KEPT // (3 * self.replicas))
        keep = functools.lru_cache(self.kept)
        self.rows: Callable[[tuple[int, ...]], Part]
        self.rows = keep(Rows(self.demands).part)
        self.copies: Callable[[tuple[int, ...]], Part]
        self.copies = keep(Copies(self.demands).part)
        self.least_slices: Callable[[tuple[int, ...]], Part]
        self.least_slices = keep(self._least_slices)

    def _least_slices(self, members: tuple[int, ...]) -> Part:
        part = self.slices.least(members)
        if self.replicas % self.on_host:
            # Even loads aren't the least: the last host has fewer replicas.
            part = part._replace(work=np.zeros(self.replicas))
        return part

    def memory(self, *parts: Part) -> NDArray[np.int64]:
        """Returns the bytes that each replica holds.

        Args:
            parts: the parts, of which that of slices is one.
        """
        return sum(part.memory for part in parts)

    def time(self, rows: Part, slices: Part, copies: Part) -> StepTime:
        """Returns the time of a step.

        Args:
            rows: the part of tables sharded by row.
            slices: the part of whole tables and columns.
            copies: the part of replicated tables.
        """
        machine, replicas = self.hardware, self.replicas
        work = rows.work + slices.work + copies.work
        started = rows.operations + slices.operations + copies.operations
        if machine.shared:
            work = np.add.reduceat(work, self._starts)
            started *= self.on_host
        calls = sum(len(p.exchange.messages) for p in (rows, slices, copies))
        rounds = rows.rounds + slices.rounds + copies.rounds
        return StepTime(
            memory=float(work.max()) / machine.memory_bandwidth,
            operations=started * machine.operation,
            transfer=cost.transfer_time(
                rows.sent + slices.sent + copies.sent, replicas, machine
            ),
            # One collective agrees on the ids of all tables.
            latency=(calls + (replicas > 1))
            * machine.levels(replicas)
            * machine.latency
            + rounds * (replicas - 1) * machine.message,
        )

    def predict(self, places: Sequence[Place]) -> Prediction:
        """Returns what a step costs.

        Args:
            places: each table's place.
        """
        number = len(self.demands)
        by_row, owners, copied = [], [], []
        for i, place in enumerate(places):
            if place.ranks:
                member = self.slices.kinds.index((i, len(place.ranks)))
                owners.append((member, place.ranks))
            elif place.placement != "row":
                copied.append(i)
            elif place.hot_rows and self.demands[i].usage.hot is not None:
                by_row.append(number + i)
            else:
                by_row.append(i)
        rows, copies = self.rows(tuple(by_row)), self.copies(tuple(copied))
        slices = self.slices.part(owners)
        parts = rows, slices, copies
        messages = [m for part in parts for m in part.exchange.messages]
        return Prediction(
            self.time(*parts),
            Exchange(self.replicas, tuple(messages)),
            self.memory(rows, slices, copies),
            rows.lookups + slices.lookups + copies.lookups,
            rows.work + slices.work + copies.work,
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
    slices = [(i, len(p.ranks)) for i, p in enumerate(places) if p.ranks]
    return Model(demands, hardware, slices).predict(places)
