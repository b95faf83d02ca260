"""What a step on given ids of tables sharded by row sends, to the byte."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tfrs_embed.distribution import hot_rows, row_exchange, vector_exchange
from tfrs_embed.distribution.exchange_kind import first_ranks, vectors_are_less
from tfrs_embed.distribution.traffic import Collective, Traffic
from tfrs_embed.ops.bag_matrix import BagColumns
from tfrs_embed.ops.bags import is_wide
from tfrs_embed.tools.planner.traffic import FLOAT, StepTraffic
from tfrs_embed.tools.planner.usage import FeatureUsage

HALF = 2  # Bytes of a number of a row of bfloat16 or float16.


class FeatureIds(NamedTuple):
    """The ids that one replica looks up of a feature.

    Attributes:
        table: the table's name.
        ids: the ids, [n].
        bags: the number of bags, each of which becomes one vector.
        ragged: whether bags have different numbers of ids.
        weighted: whether the ids have weights.
    """

    table: str
    ids: Any
    bags: int
    ragged: bool = False
    weighted: bool = False


def exchange_of_ids(
    tables: Mapping[str, tuple[int, int]],
    ids: Sequence[Sequence[FeatureIds]],
    hot: Mapping[str, Sequence[int]] | None = None,
    element: int = FLOAT,
    narrow: Collection[str] = (),
) -> tuple[StepTraffic, list[int]]:
    """The exchange of a step on given ids of tables sharded by row.

    Args:
        tables: each table's rows and width.
        ids: for each rank, the ids of each feature.
        hot: by table, the rows that each replica has a copy of.
        element: bytes of a number of vectors and gradients, and of float32
            rows.
        narrow: the tables whose numbers have two bytes.

    Returns:
        The exchange, and for each rank the number of unique keys, and of all
        ids that are exchanged by vectors.
    """
    world, hot = len(ids), hot or {}
    numbers = {t: HALF if t in narrow else FLOAT for t in tables}
    # The bags of each feature that is exchanged by vectors: words of a bag.
    by_vectors: dict[int, int] = {}
    for i, of_ranks in enumerate(zip(*ids, strict=True)):
        table, weighted = of_ranks[0].table, of_ranks[0].weighted
        rows, dim = tables[table]
        # A replica may have no bags.
        size = FeatureUsage(
            samples=0.0,
            ids=0.0,
            most_bags=sum(f.bags for f in of_ranks),
            most_ids=sum(np.size(f.ids) for f in of_ranks),
            ragged=any(f.ragged for f in of_ranks),
        ).bag_size
        if (
            size is not None
            and not len(hot.get(table, ()))
            and not is_wide(rows)
            and vectors_are_less(size, dim, world, element, numbers[table])
        ):
            by_vectors[i] = BagColumns(size, weighted).width
    # For each rank, the unique keys of each table but for these features.
    unique = [
        _unique_by_table(f for i, f in enumerate(each) if i not in by_vectors)
        for each in ids
    ]
    # By the width and the bytes of a number, keys [from rank, to rank].
    sent: dict[tuple[int, int], np.ndarray] = {}
    first_rank = first_ranks((f.table for f in ids[0]), world)
    for table in unique[0]:
        kind = tables[table][1], numbers[table]
        counts = sent.setdefault(kind, np.zeros([world] * 2, np.int64))
        for rank in range(world):
            keys = np.setdiff1d(unique[rank][table], hot.get(table, ()))
            owners = (keys.astype(np.int64) + first_rank[table]) % world
            counts[rank] += np.bincount(owners, minlength=world)
    messages: list[Collective] = []
    for (dim, number), counts in sent.items():
        messages += row_exchange.collectives(
            counts.max(), dim, min(element, number), element
        )
    if by_vectors:
        messages += vector_exchange.collectives(
            max(f[i].bags for f in ids for i in by_vectors),
            sum(by_vectors.values()),
            sum(tables[ids[0][i].table][1] for i in by_vectors),
            element,
        )
    floats = [hot_rows.num_floats(len(h), tables[t][1]) for t, h in hot.items()]
    messages += hot_rows.collectives(sum(floats))
    number_of_keys = [
        sum(keys.size for keys in unique[rank].values())
        + sum(np.size(ids[rank][i].ids) for i in by_vectors)
        for rank in range(world)
    ]
    return StepTraffic(
        world, tuple(messages if world > 1 else ())
    ), number_of_keys


def _unique_by_table(features: Iterable[FeatureIds]) -> dict[str, np.ndarray]:
    """The unique ids of each table."""
    ids: dict[str, list[np.ndarray]] = {}
    for feature in features:
        ids.setdefault(feature.table, []).append(np.ravel(feature.ids))
    return {t: np.unique(np.concatenate(each)) for t, each in ids.items()}


def expected_traffic(
    tables: Mapping[str, tuple[int, int]],
    ids: Sequence[Sequence[FeatureIds]],
    hot_rows: Mapping[str, Sequence[int]] | None = None,
    element: int = FLOAT,
    narrow: Collection[str] = (),
) -> list[Traffic]:
    """The traffic of each replica in a step on tables sharded by row.

    For the arguments see `exchange_of_ids`.

    Returns:
        Each rank's traffic, as `RowWiseEngine.traffic` counts it.
    """
    if len(ids) == 1:
        return [Traffic(0, 0, 0)]  # Nothing is sent, nor counted.
    exchange, keys = exchange_of_ids(tables, ids, hot_rows, element, narrow)
    return [Traffic(exchange.collectives, exchange.bytes, n) for n in keys]
