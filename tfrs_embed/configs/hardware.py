"""The hardware that a plan is for."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

from tfrs_embed.compat.arguments import (
    convert_fields,
    flag,
    integer_or_none,
    number,
    text,
)


@dataclasses.dataclass(frozen=True)
class Hardware:
    """Assumptions about the replicas' hardware and network.

    Example:
        >>> slow = tfrs_embed.Hardware(
        ...     name="4 GPUs on PCIe",
        ...     replicas_per_host=4,
        ...     memory=24 * 10**9,
        ...     memory_bandwidth=0.9e12,
        ...     inside_bandwidth=12e9,
        ...     outside_bandwidth=3e9,
        ... )
        >>> slow.latency
        2e-05

    Attributes:
        name: the name in reports.
        replicas_per_host: the replicas of one host; None: all replicas.
        memory: bytes that a replica has; None: not known, no limit.
        memory_bandwidth: bytes that a replica reads or writes in a second.
        inside_bandwidth: bytes that a replica sends to others of its host in a
            second.
        outside_bandwidth: bytes that a replica sends to other hosts in a
            second.
        latency: seconds of a collective for each level of switches, whatever
            its bytes.
        message: seconds of the sender for each message to another replica.
        operation: seconds that an operation takes to start.
        shared: whether a host's replicas share its memory and cores, as
            processes do on one CPU: the bandwidths are then the host's.

    Raises:
        ValueError: a value is out of its range.
        TypeError: a value is of the wrong kind.
    """

    name: str
    replicas_per_host: int | None
    memory: int | None
    memory_bandwidth: float
    inside_bandwidth: float
    outside_bandwidth: float
    latency: float = 20e-6
    message: float = 1e-6
    operation: float = 2.3e-6
    shared: bool = False

    def __post_init__(self) -> None:
        """Checks the fields."""
        checks: dict[str, Callable[[Any, str], Any]] = {
            field.name: functools.partial(
                number, positive=field.name.endswith("bandwidth")
            )
            for field in dataclasses.fields(self)
        }
        checks |= {"name": text, "shared": flag}
        checks |= dict.fromkeys(
            ("replicas_per_host", "memory"), integer_or_none
        )
        convert_fields(self, "Hardware", **checks)

    def on_host(self, replicas: int) -> int:
        """Returns how many of a job's replicas are on one host.

        Args:
            replicas: the number of all replicas.

        Returns:
            The number on a host, at least 1.
        """
        return min(replicas, self.replicas_per_host or replicas)

    def levels(self, replicas: int) -> int:
        """Returns the levels of switches between a job's replicas.

        Args:
            replicas: the number of all replicas.

        Returns:
            1 in one host, 2 in a rack of up to 32 hosts, 3 beyond a rack.
        """
        host = self.on_host(replicas)
        return 1 if replicas <= host else 2 if replicas <= 32 * host else 3


_GB = 10**9
#: From data sheets: memory, its bandwidth, NVLink's in one direction; and the
#: bandwidth out of the host, of a network card for each accelerator.
_ACCELERATORS = {
    "V100": (32 * _GB, 0.9e12, 150e9, 12.5e9),
    "A100": (80 * _GB, 2.0e12, 300e9, 25e9),
    "H100": (80 * _GB, 3.35e12, 450e9, 50e9),
    "H200": (141 * _GB, 4.8e12, 450e9, 50e9),
}
_REPLICAS_PER_HOST = 8


def hardware(topology: str | Hardware) -> Hardware:
    """Returns the hardware that a topology names.

    Args:
        topology: accelerators of a host, such as "8xA100" or "16xH100"; "A100"
            is 8 of them. "cpu": all replicas are processes, or logical CPUs, of
            one machine; "4xcpu": four on each machine. A `Hardware` is
            returned.

    Raises:
        ValueError: no hardware of this name is known.
        TypeError: `topology` is of another type.
    """
    if isinstance(topology, Hardware):
        return topology
    if not isinstance(topology, str):
        raise TypeError(
            "topology must be a string such as '8xA100', or a Hardware, got "
            f"{type(topology).__name__}."
        )
    match = re.fullmatch(r"(?:([1-9]\d{0,5})x)?(\w+)", topology.strip())
    name = match[2].upper() if match else ""
    if match is None or name not in (*_ACCELERATORS, "CPU"):
        known = ", ".join(f"{_REPLICAS_PER_HOST}x{n}" for n in _ACCELERATORS)
        raise ValueError(
            f"topology={topology!r} is not known. Known are {known} and cpu, "
            "with any number of replicas on a host; others are described by a "
            "tfrs_embed.Hardware."
        )
    count = int(match[1]) if match[1] else None
    if name == "CPU":
        # Fitted to measured steps on two cores; see benchmarks/fit_planner.py.
        return Hardware(
            name=f"{count}xcpu" if count else "cpu",
            replicas_per_host=count,
            memory=None,
            memory_bandwidth=13e9,
            inside_bandwidth=34e9,
            outside_bandwidth=1.25e9,
            latency=8e-4,
            message=0.0,
            operation=7e-6,
            shared=True,
        )
    count = count or _REPLICAS_PER_HOST
    memory, bandwidth, inside, outside = _ACCELERATORS[name]
    return Hardware(
        f"{count}x{name}", count, memory, bandwidth, inside, outside
    )
