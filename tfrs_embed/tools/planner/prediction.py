"""The cost of a step: its time, messages and memory."""

from __future__ import annotations

import dataclasses

import numpy as np

from tfrs_embed.configs.hardware import Hardware
from tfrs_embed.tools.planner import cost
from tfrs_embed.tools.planner.cost import StepTime
from tfrs_embed.tools.planner.parts import Part
from tfrs_embed.tools.planner.traffic import Exchange


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


def predict(hardware: Hardware, *parts: Part) -> Prediction:
    """Returns the cost of a step; one of the parts must be of slices."""
    messages = [m for part in parts for m in part.exchange.messages]
    return Prediction(
        step_time(hardware, *parts),
        Exchange(parts[0].exchange.replicas, tuple(messages)),
        sum(part.memory for part in parts),
        sum(part.lookups for part in parts),
        sum(part.work for part in parts),
    )


def step_time(hardware: Hardware, *parts: Part) -> StepTime:
    """Returns the time of a step; one of the parts must be of slices."""
    exchanges = [part.exchange for part in parts]
    replicas = exchanges[0].replicas
    work = sum(part.work for part in parts)
    operations = sum(part.operations for part in parts)
    on_host = hardware.on_host(replicas)
    hosts = range(0, replicas, on_host)
    # A host's replicas share its disk.
    pages = np.add.reduceat(sum(part.disk_pages for part in parts), hosts)
    if hardware.shared:
        # They share its memory and cores, too.
        work = np.add.reduceat(work, hosts)
        operations *= on_host
    sent = sum(each.passed_bytes for each in exchanges)
    # One more collective is the consensus on ids.
    calls = sum(len(each.messages) for each in exchanges) + (replicas > 1)
    rounds = sum(each.rounds for each in exchanges)
    return StepTime(
        memory=float(work.max()) / hardware.memory_bandwidth,
        operations=operations * hardware.operation,
        transfer=cost.transfer_time(sent, replicas, hardware),
        latency=calls * hardware.levels(replicas) * hardware.latency
        + rounds * (replicas - 1) * hardware.message,
        disk=float(pages.max()) / hardware.disk_iops,
    )
