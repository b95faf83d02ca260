"""The cost of a step: its time, messages and memory."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from tfrs_embed.configs.hardware import Hardware
from tfrs_embed.tools.planner import cost
from tfrs_embed.tools.planner.candidates import Demand
from tfrs_embed.tools.planner.cost import StepTime
from tfrs_embed.tools.planner.parts import Copies, Part, Rows, Slices
from tfrs_embed.tools.planner.traffic import Exchange

# The cached parts of each kind have about so many numbers.
_MOST_KEPT = 10**7


@dataclasses.dataclass(frozen=True, eq=False)
class Prediction:
    """The cost of a step.

    Attributes:
        time: the time.
        exchange: the collectives.
        memory: bytes of tables and slots on each replica, [replicas] int64.
        lookups: rows, or slices of rows, that each replica reads, [replicas].
        work: weighted bytes that each replica reads and writes, [replicas].
    """

    time: StepTime
    exchange: Exchange
    memory: np.ndarray
    lookups: np.ndarray
    work: np.ndarray

    @property
    def imbalance(self) -> float:
        """The most work of a replica, over the mean; 1 without any work."""
        mean = float(self.work.mean())
        return float(self.work.max()) / mean if mean else 1.0


class Model:
    """The costs of tables on some hardware; caches parts.

    `slices` has all pairs of a table's index and a number of slices that will
    be asked for; the members of `Slices` are the pairs' indices.

    Attributes:
        kept: how many parts of each kind are cached.
        rows: returns the part of tables sharded by row, given `Rows` members.
        copies: returns the part of replicated tables, given `Copies` members.
    """

    def __init__(
        self,
        demands: Sequence[Demand],
        hardware: Hardware,
        slices: Iterable[tuple[int, int]],
    ):
        self.hardware = hardware
        self.replicas = len(demands[0].usage.owned)
        # The replicas that share memory and cores.
        self._on_host = 1
        if hardware.shared:
            self._on_host = hardware.on_host(self.replicas)
        self._starts = range(0, self.replicas, self._on_host)
        self.slices = Slices(demands, slices)
        self.kept = max(1000, _MOST_KEPT // (3 * self.replicas))
        keep = functools.lru_cache(self.kept)
        self.rows: Callable[[tuple[int, ...]], Part]
        self.rows = keep(Rows(demands).part)
        self.copies: Callable[[tuple[int, ...]], Part]
        self.copies = keep(Copies(demands).part)

    def time(self, *parts: Part) -> StepTime:
        """Returns the time of a step; one of the parts must be of slices."""
        machine, replicas = self.hardware, self.replicas
        work = sum(part.work for part in parts)
        operations = sum(part.operations for part in parts)
        if machine.shared:
            work = np.add.reduceat(work, self._starts)
            operations *= self._on_host
        exchanges = [part.exchange for part in parts]
        sent = sum(each.passed_bytes for each in exchanges)
        # One more collective is the consensus on ids.
        calls = sum(len(each.messages) for each in exchanges) + (replicas > 1)
        rounds = sum(each.rounds for each in exchanges)
        return StepTime(
            memory=float(work.max()) / machine.memory_bandwidth,
            operations=operations * machine.operation,
            transfer=cost.transfer_time(sent, replicas, machine),
            latency=calls * machine.levels(replicas) * machine.latency
            + rounds * (replicas - 1) * machine.message,
        )

    def predict(self, *parts: Part) -> Prediction:
        """Returns the cost of a step; one of the parts must be of slices."""
        messages = [m for part in parts for m in part.exchange.messages]
        return Prediction(
            self.time(*parts),
            Exchange(self.replicas, tuple(messages)),
            sum(part.memory for part in parts),
            sum(part.lookups for part in parts),
            sum(part.work for part in parts),
        )
