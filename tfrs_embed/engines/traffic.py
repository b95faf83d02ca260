"""The communication of a replica, counted."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The communication of one replica since its tables were built.

    Attributes:
        collectives: collectives that it took part in.
        bytes: bytes of keys, rows and gradients sent to other replicas,
            padding included.
        least_bytes: the same without padding: 8 bytes for each unique key
            whose row another replica holds, and its row and gradient.
        unique_keys: unique keys looked up, of all tables.
    """

    collectives: int
    bytes: int
    least_bytes: int
    unique_keys: int
