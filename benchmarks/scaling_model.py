"""A model of the bytes that a step on sharded tables sends.

The formulas are those of `tfrs_embed.planner.traffic`, whose `expected_traffic`
computes the numbers that `ShardedEngine.traffic` counts for given ids;
`benchmarks/sharded.py --check-model` compares the two. This applies them to
clusters on which the library has not run yet, and prints the tables of
docs/scaling.md.
"""

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfrs_embed.planner.traffic import (
    FLOAT,
    KEY,
    bucket,
    collectives,
    least_bytes,
    longest_message,
    sent_bytes,
)


def power_law(rows: int, alpha: float) -> np.ndarray:
    """Probabilities of a table's ids, proportional to (id + 1) ** -alpha."""
    p = np.arange(1, rows + 1, dtype=np.float64) ** -alpha
    return p / p.sum()


def expected_unique(p: np.ndarray, draws: int) -> float:
    """Expected number of different ids among independent draws."""
    return float(-np.expm1(draws * np.log1p(-p)).sum())


def longest(
    means: np.ndarray, senders: int, certain: np.ndarray | int = 0
) -> int:
    """The longest message that any of the senders has for any owner.

    It is `longest_message` for owners that differ.

    Args:
        means: for each owner, the mean length of a message to it.
        senders: the number of senders.
        certain: for each owner, keys beyond these that all messages have.

    Returns:
        The smallest length that no message exceeds in half of the steps.
    """
    means = np.asarray(means, np.float64)[:, None]
    high = means.max()
    k = np.arange(int(high + 12 * math.sqrt(high) + 40))
    log_factorials = np.concatenate([[0.0], np.cumsum(np.log(k[1:]))])
    p = np.exp(k * np.log(means) - means - log_factorials)
    more = np.cumsum(p[:, ::-1], 1)[:, ::-1] - p  # P(length > k)
    lengths = np.arange(len(k) + np.max(certain))
    rest = lengths - np.broadcast_to(certain, means.shape[0])[:, None]
    more = np.take_along_axis(more, np.clip(rest, 0, len(k) - 1), 1)
    exceeded = np.where(rest < 0, 1.0, more).sum(0) * senders
    return int(lengths[exceeded <= math.log(2)][0])


def longest_if_sorted(
    p: np.ndarray, draws: int, tables: int, world: int, apart: bool = False
) -> int:
    """The longest message where the low ids of all tables are frequent.

    Id i of each table is on shard i % world: the most frequent row of every
    table is on the first.

    Args:
        p: probabilities of a table's ids, the highest first.
        draws: a batch's lookups in each table.
        tables: the number of tables.
        world: the number of shards.
        apart: whether instead each table began on a shard of its own.

    Returns:
        What `longest` returns.
    """
    occurs = -np.expm1(draws * np.log1p(-p))
    shard = np.arange(len(p)) % world
    often = occurs > 0.5
    means = np.bincount(shard[~often], occurs[~often], world)
    certain = np.bincount(shard[often], minlength=world)
    first = [i * world // tables if apart else 0 for i in range(tables)]
    return longest(
        sum(np.roll(means, n) for n in first),
        world,
        sum(np.roll(certain, n) for n in first),
    )


class Link(NamedTuple):
    """Assumptions about a cluster."""

    node: int = 8  # GPUs of a node
    inside: float = 450e9  # bytes/s a GPU sends within its node
    outside: float = 50e9  # bytes/s a GPU sends to other nodes
    latency: float = 20e-6  # seconds per collective and level of switches
    message: float = 1e-6  # seconds per message to another GPU


def levels(world: int, link: Link) -> int:
    """Levels of switches: NVLink's, a rack's, and a spine's."""
    return 1 if world <= link.node else 2 if world <= 32 * link.node else 3


class Flat(NamedTuple):
    """A step with the exchange as it is: everyone to everyone."""

    mean: float  # keys of a message
    capacity: int
    bytes: int
    padding: float  # bytes of the least
    outside: float  # share of the bytes to other nodes
    latency: float
    messages: float
    transfer: float


def flat(world: int, unique: float, length: int, dim: int, link: Link) -> Flat:
    """The exchange of one width, of all tables together.

    Args:
        world: the number of GPUs.
        unique: unique keys of a GPU's batch.
        length: the longest message's.
        dim: the width.
        link: the cluster.
    """
    mean = unique / world
    capacity = bucket(length)
    sent = sent_bytes(world - 1, capacity, dim)
    mates = min(world, link.node) - 1
    outside = (world - 1 - mates) / (world - 1)
    return Flat(
        mean,
        capacity,
        sent,
        sent / least_bytes(mean * (world - 1), dim),
        outside,
        collectives(1) * levels(world, link) * link.latency,
        3 * (world - 1) * link.message,
        max(
            sent * (1 - outside) / link.inside,
            sent * outside / link.outside,
        ),
    )


class Hierarchical(NamedTuple):
    """A step with an exchange in two stages: in the node, then between."""

    unique: float  # keys that a GPU asks other nodes for, and its own node
    capacity: int  # of a message to another node
    inside_bytes: int
    outside_bytes: int
    messages: int
    transfer: float


def hierarchical(
    world: int, unique: float, of_node: float, dim: int, link: Link
) -> Hierarchical:
    """The exchange if the GPUs of a node asked for a row once.

    GPU j of a node collects its node's keys for the GPUs j of all nodes, makes
    them unique, and talks to those alone.

    Args:
        world: the number of GPUs.
        unique: unique keys of a GPU's batch.
        of_node: unique keys of a node's batch.
        dim: the width.
        link: the cluster.
    """
    nodes = world // link.node
    mine = of_node / link.node
    first = bucket(longest_message(unique / link.node, link.node * world))
    second = bucket(longest_message(mine / nodes, nodes * world))
    inside = sent_bytes(link.node - 1, first, dim)
    outside = sent_bytes(nodes - 1, second, dim)
    return Hierarchical(
        mine,
        second,
        inside,
        outside,
        3 * (link.node - 1 + nodes - 1),
        inside / link.inside + outside / link.outside,
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _mb(number: float) -> str:
    return f"{number / 1e6:,.{1 if number < 1e8 else 0}f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def main() -> None:
    """Prints the tables of docs/scaling.md."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--tables", type=int, default=26)
    parser.add_argument("--rows", type=int, default=8_000_000)
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8192, help="per GPU")
    parser.add_argument("--alpha", type=float, default=1.05)
    args = parser.parse_args()
    link = Link()
    worlds = 8, 64, 1024
    p = power_law(args.rows, args.alpha)

    def unique(batch: int) -> float:
        return args.tables * expected_unique(p, batch)

    print("## Memory: parameters and one slot\n")
    table_bytes = args.tables * args.rows * args.dim * FLOAT
    print(
        table(
            ["GPUs", "replicated, GB/GPU", "sharded, GB/GPU"],
            [
                [
                    f"{w:,}",
                    f"{2 * table_bytes / 1e9:,.0f}",
                    f"{2 * table_bytes / w / 1e9:,.2f}",
                ]
                for w in worlds
            ],
        )
    )
    cases = [(w, args.batch) for w in worlds]
    cases += [(w, args.batch * worlds[0] // w) for w in worlds[1:]]
    made, capacities = [], []
    for w, b in cases:
        u = unique(b)
        lengths = (
            longest_message(u / w, w * w),
            longest_if_sorted(p, b, args.tables, w),
        )
        both = [flat(w, u, length, args.dim, link) for length in lengths]
        made.append((w, b, u, *both))
        apart = longest_if_sorted(p, b, args.tables, w, apart=True)
        capacities.append(bucket(apart))
    print("## Bytes: frequent ids anywhere / the low ids\n")
    print(
        table(
            [
                "GPUs",
                "B",
                "U",
                "U / W",
                "C",
                "C, tables apart",
                "MB sent",
                "of the least",
                "to other nodes",
                "all-gather, MB",
            ],
            [
                [
                    f"{w:,}",
                    f"{b:,}",
                    f"{u:,.0f}",
                    f"{f.mean:,.1f}",
                    f"{f.capacity:,} / {s.capacity:,}",
                    f"{apart:,}",
                    f"{_mb(f.bytes)} / {_mb(s.bytes)}",
                    f"{f.padding:.2f} / {s.padding:.2f}",
                    f"{f.outside:.0%}",
                    _mb((w - 1) * args.tables * b * (KEY + FLOAT * args.dim)),
                ]
                for (w, b, u, f, s), apart in zip(made, capacities, strict=True)
            ],
        )
    )
    print("## Time bounds, ms\n")
    print(
        table(
            ["GPUs", "B", "transfer", "latency", "messages", "sum"],
            [
                [
                    f"{w:,}",
                    f"{b:,}",
                    f"{_ms(f.transfer)} / {_ms(s.transfer)}",
                    _ms(f.latency),
                    _ms(f.messages),
                    " / ".join(
                        _ms(x.transfer + x.latency + x.messages) for x in (f, s)
                    ),
                ]
                for w, b, _, f, s in made
            ],
        )
    )
    print("## If the exchange had two stages\n")
    rows = []
    for w, b, u, f, _ in made:
        if w <= link.node:
            continue
        h = hierarchical(w, u, unique(b * link.node), args.dim, link)
        rows.append(
            [
                f"{w:,}",
                f"{b:,}",
                f"{h.unique / (u / link.node) / link.node:.0%}",
                f"{h.capacity:,}",
                _mb(h.inside_bytes),
                _mb(h.outside_bytes),
                _mb(f.bytes * f.outside),
                f"{h.messages:,}",
                f"{3 * (w - 1):,}",
                _ms(h.transfer),
            ]
        )
    print(
        table(
            [
                "GPUs",
                "B",
                "unique in the node",
                "C between nodes",
                "MB inside",
                "MB outside",
                "now",
                "messages",
                "now",
                "transfer, ms",
            ],
            rows,
        )
    )


if __name__ == "__main__":
    main()
