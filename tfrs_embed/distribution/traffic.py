"""What a replica sends: its collectives, and counters of their bytes."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, NamedTuple

import tensorflow as tf

KEY = 8  # Bytes of a key.
WORD = 4  # Bytes of a word of bags, and of a float32 number.


class Collective(NamedTuple):
    """A collective of a training step.

    Attributes:
        kind: "all_to_all", "all_gather", "all_reduce" of float32 numbers, or
            "max", whose bytes are not counted.
        size: the bytes that a replica contributes; for "all_to_all" those for
            one other replica.
    """

    kind: str
    size: Any = 0

    def sent(self, world: int) -> Any:
        """Returns the bytes that a replica sends; of an all-gather, once.

        In a ring all-reduce, each replica sends a part of the numbers to the
        next one, once to sum them up and once to spread the sums, until all
        parts have been everywhere.
        """
        if self.kind == "all_to_all":
            return (world - 1) * self.size
        if self.kind == "all_reduce":
            return 2 * (world - 1) * WORD * -(-self.size // WORD // world)
        return self.size


def capacity_of(count: float) -> int:
    """Rounds a count up as `replicas.bucket_of` does; for known counts."""
    n = max(math.ceil(count), 8)
    unit = 1 << (n.bit_length() - 4)
    return -(-n // unit) * unit


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The communication of one replica since its tables were built.

    Attributes:
        collectives: collectives that it took part in.
        bytes: bytes of keys, rows, vectors and gradients sent to other
            replicas, padding included. What all-gathers send to all replicas
            alike counts once.
        unique_keys: unique keys looked up in tables by row; ids of those that
            are exchanged by vectors, and of tables by columns.
    """

    collectives: int
    bytes: int
    unique_keys: int


class Sent:
    """Counts what a part of a replica's step adds to its `Traffic`.

    Collectives count themselves and their bytes. Exchanges add the rest. Only
    collectives of `graph` are counted, not those of its branches, which fail;
    None: nothing is counted.
    """

    def __init__(self, graph: Any = None) -> None:
        self._graph = graph
        self._terms: list[list[Any]] = [[] for _ in Traffic.__annotations__]

    def add(
        self,
        collectives: int = 0,
        bytes: Any = 0,
        unique: Any = 0,
    ) -> None:
        """Adds numbers, or scalars int64."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            return
        added = (collectives, bytes, unique)
        for terms, number in zip(self._terms, added, strict=True):
            if not (isinstance(number, int) and number == 0):
                terms.append(number)

    def total(self) -> tf.Tensor | None:
        """Returns the sums, [3] int64; None: nothing was added."""
        if not any(self._terms):
            return None
        sums = []
        for terms in self._terms:
            known = sum(n for n in terms if isinstance(n, int))
            found = [n for n in terms if not isinstance(n, int)]
            sums.append(tf.add_n([*found, tf.constant(known, tf.int64)]))
        return tf.stack(sums)
