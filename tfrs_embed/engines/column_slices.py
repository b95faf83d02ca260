"""The replicas that hold tables by columns: whole, or cut into slices.

placement="table" makes one slice, on one replica. placement="column" makes
slices of equally many columns, each on a replica of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.configs.tables import TableSpec
from tfrs_embed.ops.bags import is_wide

#: Looking up a narrower slice takes as long as this width.
NARROWEST = 8


def most_slices(dim: int, world: int) -> int:
    """The number of slices of placement="column" without a plan.

    It is the largest power of two up to `world` that divides `dim` into slices
    of at least `NARROWEST` columns; at least 1.
    """
    count = 1
    while (
        2 * count <= world
        and dim % (2 * count) == 0
        and dim // (2 * count) >= NARROWEST
    ):
        count *= 2
    return count


def assign(
    tables: Sequence[TableSpec], world: int
) -> dict[str, tuple[int, ...]]:
    """Assigns replicas to the slices of tables placed by "table" or "column".

    Returns each table's ranks, in the order of its slices' columns, by name.
    Tables without ranks from a plan go, the largest first, to the replicas
    with the fewest numbers so far; of equals, to those of the lowest rank.

    Raises:
        ValueError: a table has more than 2^31 - 1 rows, its ranks are not of
            these replicas, or its columns can't be shared out evenly.
    """
    loads = [0] * world
    found: dict[str, tuple[int, ...]] = {}

    def add(table: TableSpec, ranks: Sequence[int]) -> None:
        found[table.name] = tuple(ranks)
        for rank in ranks:
            loads[rank] += table.vocabulary_size * (table.dim // len(ranks))

    for table in tables:
        if is_wide(table.vocabulary_size):
            raise ValueError(
                f"Table '{table.name}': placement='{table.placement}' takes "
                f"at most {tf.int32.max} rows, and vocabulary_size is "
                f"{table.vocabulary_size}; use placement='row'."
            )
        if table.ranks:
            _check(table, world)
            add(table, table.ranks)
    free = [table for table in tables if not table.ranks]
    # sorted() is stable.
    for table in sorted(free, key=lambda t: -t.vocabulary_size * t.dim):
        count = (
            1 if table.placement == "table" else most_slices(table.dim, world)
        )
        emptiest = sorted(range(world), key=lambda rank: loads[rank])
        add(table, emptiest[:count])
    return found


def require_uncut(table: TableSpec, count: int, needs: str | None) -> None:
    """Raises a ValueError if a cut table's optimizer needs whole rows.

    `needs` is the part of the optimizer that does; None: nothing does.
    """
    if count > 1 and needs:
        raise ValueError(
            f"Table '{table.name}': placement='{table.placement}' cuts its "
            f"{table.dim} columns into {count} slices, and {needs} needs "
            "all columns of a row to update it; use placement='table' or 'row'."
        )


def _check(table: TableSpec, world: int) -> None:
    ranks = table.ranks
    if len(set(ranks)) < len(ranks) or not all(0 <= r < world for r in ranks):
        raise ValueError(
            f"Table '{table.name}': its ranks must be unique, from 0 to "
            f"{world - 1}, got {list(ranks)}."
        )
    if table.dim % len(ranks):
        raise ValueError(
            f"Table '{table.name}': {table.dim} columns can't be shared out "
            f"evenly among {len(ranks)} replicas."
        )
