"""A model of the bytes that a step on sharded tables sends.

The formulas are those of `tfrs_embed.distribution.row_exchange`. With them
`expected_traffic` of tests/traffic_of_ids.py computes the numbers that
`RowWiseEngine.traffic` counts for given ids;
`benchmarks/sharded.py --check-model` compares the two. This applies them to
clusters on which the library has not run yet, and prints the tables of
docs/scaling.md.
"""

import argparse
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tfrs_embed.distribution import row_exchange
from tfrs_embed.distribution.exchange_kind import first_stage, key_bytes
from tfrs_embed.distribution.traffic import KEY, capacity_of
from tfrs_embed.tools.planner.traffic import FLOAT, longest_message


def sent_bytes(world: int, longest: int, dim: int) -> int:
    """Bytes that a GPU sends among `world`, of one width, in one stage.

    Args:
        world: the number of GPUs.
        longest: the keys of the longest message.
        dim: the width.
    """
    messages = row_exchange.collectives(longest, dim, FLOAT, FLOAT)
    return sum(each.sent(world) for each in messages)


def least_bytes(remote_keys: float, dim: int) -> float:
    """Bytes of one width for keys of other GPUs, without padding."""
    return remote_keys * key_bytes(dim, FLOAT, FLOAT)


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
    p: np.ndarray, draws: int, tables: int, world: int, apart: bool = True
) -> int:
    """The longest message where the low ids of all tables are frequent.

    Id i of each table is on shard i % world, counted from the table's first.

    Args:
        p: probabilities of a table's ids, the highest first.
        draws: a batch's lookups in each table.
        tables: the number of tables.
        world: the number of shards.
        apart: whether tables begin on different shards; else all on the first,
            which has the most frequent row of each.

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
    sent = sent_bytes(world, length, dim)
    mates = min(world, link.node) - 1
    outside = (world - 1 - mates) / (world - 1)
    return Flat(
        mean,
        capacity_of(length),
        sent,
        sent / least_bytes(mean * (world - 1), dim),
        outside,
        # A consensus on ids and sizes; keys, rows, gradients.
        4 * levels(world, link) * link.latency,
        3 * (world - 1) * link.message,
        max(
            sent * (1 - outside) / link.inside,
            sent * outside / link.outside,
        ),
    )


class Staged(NamedTuple):
    """A step with an exchange in two stages: in groups, then between them."""

    size: int  # GPUs of a group
    unique: float  # share of its GPUs' keys that are different in a group
    capacities: tuple[int, int]
    inside: float  # bytes inside the node
    outside: float  # bytes to other nodes
    padding: float  # bytes of the least
    latency: float
    messages: float
    transfer: float


def staged(
    world: int, unique: float, of_group: float, dim: int, link: Link
) -> Staged:
    """The exchange of one width if the GPUs of a group ask for a row once.

    GPU j of a group collects its group's keys for the GPUs j of all groups,
    makes them unique, and talks to those alone.

    Args:
        world: the number of GPUs.
        unique: unique keys of a GPU's batch.
        of_group: unique keys of a group's batch.
        dim: the width.
        link: the cluster.
    """
    size = first_stage(world, link.node)
    groups, mine = world // size, of_group / size
    first = longest_message(unique / size, size * world)
    second = longest_message(mine / groups, groups * world)
    in_group = sent_bytes(size, first, dim)
    between = sent_bytes(groups, second, dim)
    mates = (min(size, link.node) - 1) / (size - 1)
    inside = in_group * mates
    outside = in_group - inside + between
    moved = unique * (size - 1) / size + mine * (groups - 1) / groups
    return Staged(
        size,
        of_group / (unique * size),
        (capacity_of(first), capacity_of(second)),
        inside,
        outside,
        (in_group + between) / least_bytes(moved, dim),
        # A consensus and two sizes, then three of each stage.
        (3 * levels(size, link) + 6 * levels(world, link)) * link.latency,
        3 * (size - 1 + groups - 1) * link.message,
        inside / link.inside + outside / link.outside,
    )


def simulate(
    world: int, size: int, p: np.ndarray, draws: int, tables: int, dim: int
) -> tuple[int, int, float]:
    """An exchange in two stages of ids that are drawn, counted key by key.

    Args:
        world: the number of GPUs.
        size: the GPUs of a group.
        p: probabilities of a table's ids.
        draws: a batch's lookups in each table.
        tables: the number of tables.
        dim: their width.

    Returns:
        The keys of the longest messages in both stages, and the bytes sent of
        those without padding.
    """
    rng = np.random.default_rng(0)
    cumulated = np.cumsum(p)
    groups = world // size
    first, second = 0, 0
    moved = 0
    for group in range(groups):
        collected: list[list[np.ndarray]] = [[] for _ in range(size)]
        for place in range(size):
            drawn = np.searchsorted(cumulated, rng.random((tables, draws)))
            begin = np.arange(tables) * world // tables
            keys = drawn // world * tables + np.arange(tables)[:, None]
            owner = (np.minimum(drawn, len(p) - 1) + begin[:, None]) % world
            keys = np.unique(keys * world + owner)
            lane = keys % size  # As its owner's.
            counts = np.bincount(lane, minlength=size)
            first = max(first, int(counts.max()))
            moved += len(keys) - int(counts[place])
            for j in range(size):
                collected[j].append(keys[lane == j])
        for of_lane in collected:
            keys = np.unique(np.concatenate(of_lane))
            counts = np.bincount(keys % world // size, minlength=groups)
            second = max(second, int(counts.max()))
            moved += len(keys) - int(counts[group])
    sent = sent_bytes(size, first, dim) + sent_bytes(groups, second, dim)
    return first, second, sent / least_bytes(moved / world, dim)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _mb(number: float) -> str:
    return f"{number / 1e6:,.{1 if number < 1e8 else 0}f}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def _with_sum(step: Flat | Staged) -> list[float]:
    times = [step.transfer, step.latency, step.messages]
    return [*times, sum(times)]


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
    made = []
    for w, b in cases:
        u = unique(b)
        lengths = (
            longest_message(u / w, w * w),
            longest_if_sorted(p, b, args.tables, w),
            longest_if_sorted(p, b, args.tables, w, apart=False),
        )
        made.append(
            (w, b, u, *(flat(w, u, n, args.dim, link) for n in lengths))
        )
    print("## One stage: frequent ids anywhere / low / low, all from shard 0\n")
    print(
        table(
            [
                "GPUs",
                "B",
                "U",
                "U / W",
                "C",
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
                    f"{each[0].mean:,.1f}",
                    " / ".join(f"{f.capacity:,}" for f in each),
                    _mb(each[0].bytes),
                    " / ".join(f"{f.padding:.2f}" for f in each),
                    f"{each[0].outside:.0%}",
                    _mb((w - 1) * args.tables * b * (KEY + FLOAT * args.dim)),
                ]
                for w, b, u, *each in made
            ],
        )
    )
    print("## Two stages\n")
    rows, times = [], []
    for w, b, u, f, *_ in made:
        one, two = _with_sum(f), []
        if w > link.node:
            size = first_stage(w, link.node)
            h = staged(w, u, unique(b * size), args.dim, link)
            two = _with_sum(h)
            rows.append(
                [
                    f"{w:,}",
                    f"{b:,}",
                    f"{h.size}",
                    f"{h.unique:.0%}",
                    f"{h.capacities[0]:,} + {h.capacities[1]:,}",
                    f"{h.padding:.2f}",
                    _mb(h.inside),
                    f"{_mb(h.outside)} ({_mb(f.bytes * f.outside)})",
                    f"{h.messages / link.message:,.0f} ({3 * (w - 1):,})",
                ]
            )
        times.append(
            [
                f"{w:,}",
                f"{b:,}",
                *(
                    " / ".join(_ms(t) for t in both)
                    for both in zip(*(t for t in (one, two) if t), strict=True)
                ),
            ]
        )
    print(
        table(
            [
                "GPUs",
                "B",
                "group",
                "unique in it",
                "C",
                "of the least",
                "MB inside",
                "MB outside (one stage)",
                "messages (one stage)",
            ],
            rows,
        )
    )
    print("## Time bounds, ms: one stage / two\n")
    print(table(["GPUs", "B", "transfer", "latency", "messages", "sum"], times))
    print("## Two stages, simulated key by key\n")
    found = []
    for w, b in cases[len(worlds) :]:
        size = first_stage(w, link.node)
        first, second, padding = simulate(w, size, p, b, args.tables, args.dim)
        found.append(
            [f"{w:,}", f"{b:,}", f"{first} + {second}", f"{padding:.2f}"]
        )
    print(table(["GPUs", "B", "longest messages", "of the least"], found))


if __name__ == "__main__":
    main()
