"""The messages of a training step on tables in any places, built in numpy."""

from typing import NamedTuple

import numpy as np


class Place(NamedTuple):
    """A table's placement, and for slices the ranks that hold them."""

    placement: str
    ranks: tuple[int, ...] = ()


def padded(count):
    """The least of 8, 9 ... 15, 16, 18 ... 30, 32, 36 ... that is enough."""
    sizes = [u << s for s in range(40) for u in range(8, 16)]
    return next(size for size in sizes if size >= count)


def sends_vectors(tables, places, ids, i, number):
    """Whether vectors of a feature are less than half of its ids' rows."""
    table = ids[0][i].table
    width = np.dtype(number).itemsize * tables[table][1]
    sizes = {np.size(each[i].ids) / each[i].bags for each in ids}
    if places[table].placement != "row" or ids[0][i].ragged or len(sizes) > 1:
        return False
    [size] = sizes
    by_rows = size / 2 * (8 + 2 * width)
    return size > 1 and len(ids) * (4 * size + 2 * width) <= by_rows


def simulate(tables, places, ids, number=np.float32):
    """Makes a step's messages; returns the bytes of each rank, collectives.

    `number` is the dtype of rows, vectors and gradients as they are sent.
    """
    world = len(ids)
    sent, calls = [0] * world, 0

    def all_to_all(messages):
        nonlocal calls
        calls += 1
        size = max(len(m) for row in messages for m in row)
        for rank, row in enumerate(messages):
            for peer, message in enumerate(row):
                whole = np.zeros(size, message.dtype)
                whole[: len(message)] = message
                if peer != rank:
                    sent[rank] += whole.nbytes

    def all_gather(message):
        nonlocal calls
        calls += 1
        for rank in range(world):
            sent[rank] += message.nbytes

    by_vectors = [
        i
        for i in range(len(ids[0]))
        if sends_vectors(tables, places, ids, i, number)
    ]

    def unique_of(rank, table):
        found = [
            f.ids
            for i, f in enumerate(ids[rank])
            if f.table == table and i not in by_vectors
        ]
        return np.unique(np.concatenate([np.ravel(f) for f in found]))

    by_placement = {
        kind: [t for t in tables if places[t].placement in kind]
        for kind in (("row",), ("replicated",), ("table", "column"))
    }
    by_rows = {f.table for i, f in enumerate(ids[0]) if i not in by_vectors}
    by_rows &= set(by_placement[("row",)])
    # Each table begins on another rank.
    in_order = [
        t
        for t in dict.fromkeys(f.table for f in ids[0])
        if places[t].placement == "row"
    ]
    first = {t: i * world // len(in_order) for i, t in enumerate(in_order)}
    for dim in sorted({tables[t][1] for t in by_rows}):
        keys = [
            [
                [
                    (t, key)
                    for t in by_rows
                    if tables[t][1] == dim
                    for key in unique_of(rank, t)
                    if (key + first[t]) % world == owner
                ]
                for owner in range(world)
            ]
            for rank in range(world)
        ]
        capacity = padded(max(len(k) for row in keys for k in row))
        all_to_all([[np.zeros(1 + capacity, np.int64)] * world] * world)
        for _ in ("rows", "gradients"):
            floats = np.zeros((capacity, dim), number).ravel()
            all_to_all([[floats] * world] * world)
    if by_vectors:
        columns, floats = 0, 0
        for i in by_vectors:
            feature = ids[0][i]
            _, dim = tables[feature.table]
            size = np.size(feature.ids) // feature.bags
            columns += size
            columns += size if feature.weighted else 0
            floats += dim
        most = max(each[i].bags for each in ids for i in by_vectors)
        all_gather(np.zeros(padded(most * columns), np.int32))
        vectors = np.zeros(padded(most * floats), number)
        all_to_all([[vectors] * world] * world)
        all_gather(vectors)  # Their gradients.
    for dim in sorted({tables[t][1] for t in by_placement[("replicated",)]}):
        counts = [
            sum(
                len(unique_of(rank, t))
                for t in by_placement[("replicated",)]
                if tables[t][1] == dim
            )
            for rank in range(world)
        ]
        capacity = padded(max(counts))
        for rank in range(world):
            sent[rank] += np.zeros(capacity, np.int64).nbytes
            sent[rank] += np.zeros((capacity, dim), number).nbytes
        calls += 2
    calls += bool(by_placement[("replicated",)])
    if by_placement[("table", "column")]:
        words = [[[] for _ in range(world)] for _ in range(world)]
        vectors = [[0] * world for _ in range(world)]
        for rank, features in enumerate(ids):
            for f in features:
                ranks = places[f.table].ranks
                for owner in ranks:
                    message = words[rank][owner]
                    n = np.size(f.ids)
                    message += [0, f.bags, n, 0]
                    message += [1] * f.bags if f.ragged else []
                    message += list(np.ravel(f.ids))
                    message += [0] * n if f.weighted else []
                    width = tables[f.table][1] // len(ranks)
                    vectors[rank][owner] += np.zeros((f.bags, width)).size
        most = padded(max(len(m) for row in words for m in row))
        all_to_all([[np.zeros(most, np.int32)] * world] * world)
        most = padded(max(max(row) for row in vectors))
        for _ in ("vectors", "gradients"):
            all_to_all([[np.zeros(most, number)] * world] * world)
        calls += 1
    return sent, calls + 1
