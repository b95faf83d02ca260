"""Starts a program once on each NUMA node of this host.

    python numa.py -- python train.py --epochs 10
    python numa.py --hosts host0,host1 -- python train.py --epochs 10

The first is for one host; the second runs on each of several. The processes are
the workers of one cluster, as TF_CONFIG tells each of them. numactl keeps each
on the processors and in the memory of its node. If one fails, its host's others
are ended. Those of other hosts end by themselves, as they can't go on.

It needs numactl and absl-py, and neither TensorFlow nor this library.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from absl import app, flags

FLAGS = flags.FLAGS

_SYSTEM = pathlib.Path("/sys/devices/system/node")
_PORT = 2222
_SECONDS_TO_END = 10.0

flags.DEFINE_list(
    "hosts",
    ["localhost"],
    "all hosts of the cluster, in the same order on each; they have as many "
    "NUMA nodes as this one",
)
flags.DEFINE_integer(
    "port",
    _PORT,
    "of a host's first process; those of the others follow",
    lower_bound=1,
    upper_bound=65_535,
)


def main(argv: Sequence[str]) -> None:
    """Starts the processes and waits for them.

    Args:
        argv: the name of this program, and the command of the other.

    Raises:
        SystemExit: it doesn't start, or it fails.
    """
    command = list(argv[1:])
    if not command:
        raise SystemExit("There is no program to start, after --.")
    if "--" in sys.argv[1:] and sys.argv[-len(command) - 1] != "--":
        raise SystemExit(
            f"'{command[0]}' stands before --, and is no flag; hosts have "
            "commas between them: --hosts host0,host1"
        )
    if shutil.which("numactl") is None:
        raise SystemExit("There is no numactl: apt-get install numactl")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    nodes = find_nodes(_SYSTEM, os.sched_getaffinity(0))
    environments = make_environments(FLAGS.hosts, len(nodes), FLAGS.port)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for node, environment in zip(nodes, environments, strict=True):
            bind = [f"--cpunodebind={node}", f"--membind={node}"]
            processes.append(
                subprocess.Popen(
                    ["numactl", *bind, "--", *command],
                    env={**os.environ, **environment},
                )
            )
        codes: list[int | None] = [None]
        while None in codes and not any(codes):
            time.sleep(0.1)
            codes = [process.poll() for process in processes]
    finally:
        _end(processes)
    for node, code in zip(nodes, codes, strict=True):
        if code:
            raise SystemExit(f"The process of node {node} ended with {code}.")


def find_nodes(system: pathlib.Path, processors: set[int]) -> list[int]:
    """Finds the NUMA nodes that this process may use processors of.

    Args:
        system: the folder in which Linux describes the nodes.
        processors: those that this process may use.

    Returns:
        Their numbers, in order.

    Raises:
        SystemExit: there are none.
    """
    nodes = sorted(
        int(folder.name.removeprefix("node"))
        for folder in system.glob("node[0-9]*")
        if processors & _numbers((folder / "cpulist").read_text())
    )
    if not nodes:
        raise SystemExit(f"{system} has no NUMA nodes with processors.")
    return nodes


def _numbers(text: str) -> set[int]:
    """Reads a list as "0-3,8"; of a node without processors it is empty."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return numbers


def make_environments(
    hosts: Sequence[str], processes: int, port: int
) -> list[dict[str, str]]:
    """Tells each of this host's processes of the cluster.

    Args:
        hosts: the names or addresses of all hosts.
        processes: their number on each host.
        port: that of a host's first process.

    Returns:
        The variables of each of this host's processes.

    Raises:
        SystemExit: not just one of the hosts is this one.
    """
    here = [i for i, host in enumerate(hosts) if _is_here(host)]
    if len(here) != 1:
        raise SystemExit(
            f"Just one of the hosts {' '.join(hosts)} must be this one, "
            f"{socket.gethostname()}; {len(here)} are."
        )
    workers = [f"{host}:{port + i}" for host in hosts for i in range(processes)]
    first = here[0] * processes
    return [
        {
            "TF_CONFIG": json.dumps(
                {
                    "cluster": {"worker": workers},
                    "task": {"type": "worker", "index": first + i},
                }
            )
        }
        for i in range(processes)
    ]


def _is_here(host: str) -> bool:
    """Whether a name or an address is one of this host's."""
    try:
        infos = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except OSError as error:
        raise SystemExit(f"{host}: {error}") from None
    for family, kind, protocol, _, address in infos:
        with socket.socket(family, kind, protocol) as probe:
            try:
                probe.bind(address)
            except OSError:
                continue
            return True
    return False


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Ends the processes that still run."""
    for process in processes:
        process.terminate()
    end = time.monotonic() + _SECONDS_TO_END
    for process in processes:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    app.run(main)
