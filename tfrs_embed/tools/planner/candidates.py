"""The placements that a table may have."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

from tfrs_embed.distribution.exchange_kind import vectors_are_less
from tfrs_embed.tools.planner.traffic import (
    FLOAT,
    words_of_bag,
    words_of_piece,
)
from tfrs_embed.tools.planner.usage import FeatureUsage, TableUsage

# A narrower slice costs more for its ids than for its columns.
_LEAST_WIDTH = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Demand:
    """What a table asks of the replicas.

    Attributes:
        name: its name.
        rows: its vocabulary size.
        dim: the width of a row.
        slot_numbers: the numbers that its optimizer's slots have for a row.
        usage: its use in one replica's part of a batch.
        kept: the placement that is not for the planner to choose, or None.
        reason: why.
        keyed: whether keys are mapped to its rows.
        element: bytes of a number that is sent; of all tables the same.
        number: the bytes of a number of its rows; those of slots have 4.
        uncut: whether its optimizer needs all of a row's columns in one place.
    """

    name: str
    rows: int
    dim: int
    slot_numbers: int
    usage: TableUsage
    kept: str | None = None
    reason: str = ""
    keyed: bool = False
    element: int = FLOAT
    uncut: bool = False
    number: int = FLOAT

    @functools.cached_property
    def row_bytes(self) -> int:
        """Bytes of a row, without slots."""
        return self.dim * self.number

    @functools.cached_property
    def bytes(self) -> int:
        """Bytes of the table and its slots."""
        return self.rows * self.state_bytes

    @functools.cached_property
    def state_bytes(self) -> int:
        """Bytes of a row and its slots."""
        return self.row_bytes + self.slot_numbers * FLOAT

    @functools.cached_property
    def message_words(self) -> int:
        """Words that a replica sends to the owner of a slice."""
        return sum(
            words_of_piece(f.most_bags, f.most_ids, self.rows, f.ragged)
            for f in self.usage.features
        )

    @functools.cached_property
    def by_vectors(self) -> tuple[FeatureUsage, ...]:
        """The features that are exchanged by vectors, sharded by row."""
        replicas = len(self.usage.owned)
        return tuple(
            f
            for f in self.usage.features
            if not self.keyed
            and f.bag_size is not None
            and vectors_are_less(
                f.bag_size, self.dim, replicas, self.element, self.number
            )
        )

    @functools.cached_property
    def ids_by_vectors(self) -> float:
        """The ids of these features, on average."""
        return math.fsum(f.ids for f in self.by_vectors)

    @functools.cached_property
    def hot_bytes(self) -> int:
        """Bytes of a copy of its hot rows and their slots."""
        hot = self.usage.hot
        rows = 0 if hot is None else len(hot.ids)
        return rows * self.state_bytes

    @functools.cached_property
    def share_by_rows(self) -> float:
        """The share of the ids that are exchanged by rows, sharded by row."""
        if not self.by_vectors:
            return 1.0
        return 1.0 - self.ids_by_vectors / self.usage.ids

    @functools.cached_property
    def bag_words(self) -> int:
        """Words of a bag of each feature that is exchanged by vectors."""
        sizes = [f.bag_size or 0 for f in self.by_vectors]
        return sum(words_of_bag(size, self.rows) for size in sizes)


class Candidate(NamedTuple):
    """A placement of a table, the ranks not chosen yet.

    Attributes:
        placement: one of `PLACEMENTS`.
        slices: the number of ranks that "table" and "column" want, else 0.
        hot: of "row", whether each replica has a copy of the hot rows.
    """

    placement: str
    slices: int
    hot: bool = False

    def __str__(self) -> str:
        """The placement, and in what it differs from others of its name."""
        if self.placement == "column":
            return f"column over {self.slices}"
        return f"{self.placement} with hot rows" if self.hot else self.placement


def candidates(demand: Demand, replicas: int) -> tuple[Candidate, ...]:
    """Lists the placements that a table may have.

    Args:
        demand: the table.
        replicas: the number of replicas.

    Returns:
        The candidates: "table"; "column" over 2, 4, 8 ... ranks, as long as
        they divide the width, slices have at least 4 columns, there are as
        many replicas, and the optimizer can do without the other columns;
        "row", without hot rows and with them, if the table has some;
        "replicated". Of these the one that is kept, if one is; "table" for
        columns that can't be cut, as engines have it. On one replica a table is
        there, whatever its placement.
    """
    whole = Candidate("table", 1)
    found = [whole]
    if replicas == 1 and demand.kept is None:
        return tuple(found)
    slices = 2
    while (
        slices <= replicas
        and not demand.uncut
        and demand.dim % slices == 0
        and demand.dim // slices >= _LEAST_WIDTH
    ):
        found.append(Candidate("column", slices))
        slices *= 2
    found += [Candidate("row", 0), Candidate("replicated", 0)]
    if demand.usage.hot is not None and replicas > 1:
        if demand.kept is not None:  # They belong to what is kept.
            found = [Candidate("row", 0, hot=True)]
        else:
            found.append(Candidate("row", 0, hot=True))
    kept = tuple(c for c in found if demand.kept in (None, c.placement))
    return kept or (whole,)
