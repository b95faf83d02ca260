"""The communication of a replica, counted."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The communication of one replica since its tables were built.

    Attributes:
        collectives: collectives that it took part in.
        bytes: bytes of keys, rows, vectors and gradients sent to other
            replicas, padding included. Of what goes to all replicas alike, in
            all-gathers, the bytes that it gives to them, once.
        least_bytes: what its own ids need without padding: for tables by row 8
            bytes for each unique key that moves, and its row and gradient, or,
            exchanged by vectors, bags, vectors and gradients; for tables by
            columns the bags, vectors and gradients of other replicas' slices.
        unique_keys: unique keys looked up in tables by row; ids of those that
            are exchanged by vectors, and of tables by columns.
    """

    collectives: int
    bytes: int
    least_bytes: int
    unique_keys: int


class Sent(NamedTuple):
    """What part of a step adds to a replica's `Traffic`.

    Each is a number, or a scalar int64 tensor.
    """

    collectives: Any = 0
    bytes: Any = 0
    least: Any = 0
    unique: Any = 0

    def plus(
        self,
        collectives: Any = 0,
        bytes: Any = 0,
        least: Any = 0,
        unique: Any = 0,
    ) -> Sent:
        """The sums of this and more."""
        more = (collectives, bytes, least, unique)
        # No operation is made for what adds nothing.
        return Sent(
            *(
                b
                if isinstance(a, int) and a == 0
                else a
                if isinstance(b, int) and b == 0
                else a + b
                for a, b in zip(self, more, strict=True)
            )
        )
