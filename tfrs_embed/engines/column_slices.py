"""The replicas that hold tables by columns: whole, or cut into slices.

A table that is placed by "table" is one slice, on one replica. By "column" it
is cut into slices of equally many columns, each on a replica of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tfrs_embed.configs.tables import TableSpec

#: A narrower slice costs as much to look up as one of so many columns.
NARROWEST = 8


@dataclasses.dataclass(frozen=True)
class ColumnSlices:
    """A table's slices.

    Attributes:
        table: the table.
        ranks: the rank of each slice's replica, from the first column on.
    """

    table: TableSpec
    ranks: tuple[int, ...]

    @property
    def width(self) -> int:
        """The number of a slice's columns."""
        return self.table.dim // len(self.ranks)

    def on(self, rank: int) -> TableSpec | None:
        """The slice that a replica holds, as a table; None: it holds none."""
        if rank not in self.ranks:
            return None
        return dataclasses.replace(self.table, dim=self.width)

    def first_column(self, rank: int) -> int:
        """The first column of a replica's slice."""
        return self.ranks.index(rank) * self.width


def most_slices(dim: int, world: int) -> int:
    """The slices that a table is cut into by "column", unless a plan says.

    Args:
        dim: the width of the table's rows.
        world: the number of replicas.

    Returns:
        The largest power of two that is no more than the replicas, and divides
        the width into slices of `NARROWEST` columns or more; at least 1.
    """
    count = 1
    while (
        2 * count <= world
        and dim % (2 * count) == 0
        and dim // (2 * count) >= NARROWEST
    ):
        count *= 2
    return count


def assign(tables: Sequence[TableSpec], world: int) -> list[ColumnSlices]:
    """Finds replicas for tables.

    Those that a plan has found none for go, the largest first, to the replicas
    that hold the fewest numbers so far, of these to those of the lowest rank.

    Args:
        tables: the tables, each placed by "table" or "column".
        world: the number of replicas.

    Returns:
        The slices of each table.

    Raises:
        ValueError: a table's ranks are not of these replicas, or its columns
            can't be shared out among them.
    """
    loads = [0] * world
    found: dict[str, ColumnSlices] = {}
    for table in tables:
        if table.ranks:
            _check(table, world)
            _add(found, loads, ColumnSlices(table, table.ranks))
    free = [table for table in tables if not table.ranks]
    # sorted() keeps the order of equal ones.
    for table in sorted(free, key=lambda t: -t.vocabulary_size * t.dim):
        count = (
            1 if table.placement == "table" else most_slices(table.dim, world)
        )
        emptiest = sorted(range(world), key=lambda rank: loads[rank])
        _add(found, loads, ColumnSlices(table, tuple(emptiest[:count])))
    return [found[table.name] for table in tables]


def require_uncut(table: TableSpec, count: int, needs: str | None) -> None:
    """Requires that a table is one slice, if its optimizer needs whole rows.

    Args:
        table: the table.
        count: the number of its slices.
        needs: what of its optimizer needs them; None: nothing.

    Raises:
        ValueError: it is cut.
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
            f"Table '{table.name}': its ranks must be different ones from 0 to "
            f"{world - 1}, got {list(ranks)}."
        )
    if table.dim % len(ranks):
        raise ValueError(
            f"Table '{table.name}': {table.dim} columns can't be shared out "
            f"evenly among {len(ranks)} replicas."
        )


def _add(
    found: dict[str, ColumnSlices], loads: list[int], slices: ColumnSlices
) -> None:
    table = slices.table
    found[table.name] = slices
    for rank in slices.ranks:
        loads[rank] += table.vocabulary_size * slices.width
