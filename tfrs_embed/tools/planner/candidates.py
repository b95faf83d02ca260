"""The placements that a table may have."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import NamedTuple

from tfrs_embed.distribution.exchange_kind import vectors_are_less
from tfrs_embed.ops.bags import is_wide
from tfrs_embed.tools.planner.traffic import FLOAT
from tfrs_embed.tools.planner.usage import FeatureUsage, TableUsage

# The ids of a narrower slice cost more than its columns.
_LEAST_WIDTH = 4


@dataclasses.dataclass(frozen=True, eq=False)
class Demand:
    """A table's size and use.

    Attributes:
        name: the table's name.
        rows: the vocabulary size.
        dim: the width.
        slot_numbers: float32 numbers of the optimizer's slots for a row.
        usage: the use in one replica's part of a batch.
        kept: the placement that the configuration asks for; None: any.
        reason: the reason for `kept`.
        keyed: whether the table has keys without a vocabulary.
        element: bytes of a number that is sent, the same for all tables.
        number: bytes of a number of a row.
        uncut: whether the optimizer needs whole rows.
        in_files: whether the table is in files.
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
    in_files: bool = False

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, without slots."""
        return self.dim * self.number

    @property
    def state_bytes(self) -> int:
        """Bytes of a row and its slots."""
        return self.row_bytes + self.slot_numbers * FLOAT

    @property
    def bytes(self) -> int:
        """Bytes of the table and its slots in memory; pages of files aren't."""
        return 0 if self.in_files else self.rows * self.state_bytes

    @functools.cached_property
    def by_vectors(self) -> tuple[FeatureUsage, ...]:
        """The features that are exchanged by vectors if the table is by row."""
        replicas = len(self.usage.owned)
        return tuple(
            f
            for f in self.usage.features
            if not self.keyed
            and not is_wide(self.rows)
            and f.bag_size is not None
            and vectors_are_less(
                f.bag_size, self.dim, replicas, self.element, self.number
            )
        )

    @property
    def share_by_rows(self) -> float:
        """The share of the ids that are exchanged by rows."""
        if not self.by_vectors:
            return 1.0
        return 1.0 - math.fsum(f.ids for f in self.by_vectors) / self.usage.ids

    @property
    def hot_bytes(self) -> int:
        """Bytes of a copy of the hot rows and their slots."""
        hot = self.usage.hot
        return self.state_bytes * len(hot.ids) if hot else 0


class Candidate(NamedTuple):
    """A placement that a table may have, without ranks.

    Attributes:
        placement: one of `PLACEMENTS`.
        slices: for "table" and "column" the number of ranks, else 0.
        hot: for "row", whether each replica has a copy of the hot rows.
    """

    placement: str
    slices: int = 0
    hot: bool = False

    def __str__(self) -> str:
        if self.placement == "column":
            return f"column over {self.slices}"
        return f"{self.placement} with hot rows" if self.hot else self.placement


def candidates(demand: Demand, replicas: int) -> tuple[Candidate, ...]:
    """Lists the placements that a table may have.

    They are "table"; "column" over 2, 4, 8 ... replicas, where this divides the
    width, slices have at least 4 columns, and the optimizer doesn't need whole
    rows; "row", with hot rows too if the table has some; "replicated". If one
    is kept, only this one; "table" for columns that can't be cut, as engines
    do. One replica has whole tables. Tables whose ids need 64 bits have no
    "table" and "column".
    """
    whole = Candidate("table", 1)
    wide = is_wide(demand.rows)
    found = [] if wide and replicas > 1 else [whole]
    if replicas == 1 and demand.kept is None:
        return tuple(found)
    slices = 2
    while (
        slices <= replicas
        and not demand.uncut
        and not wide
        and demand.dim % slices == 0
        and demand.dim // slices >= _LEAST_WIDTH
    ):
        found.append(Candidate("column", slices))
        slices *= 2
    found += [Candidate("row"), Candidate("replicated")]
    if demand.usage.hot is not None and replicas > 1:
        hot = Candidate("row", hot=True)
        found = [*found, hot] if demand.kept is None else [hot]
    kept = tuple(c for c in found if demand.kept in (None, c.placement))
    return kept or (whole,)
