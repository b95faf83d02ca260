"""The communication of a replica, counted."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf


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


class Sent:
    """What a part of a replica's step adds to its `Traffic`.

    Collectives add themselves, with their bytes; what is known where they are
    called adds the rest.

    Args:
        graph: the graph whose collectives are counted, not those of branches,
            which fail; None: nothing is.
    """

    def __init__(self, graph: Any = None) -> None:
        self._graph = graph
        self._terms: list[list[Any]] = [[] for _ in Traffic.__annotations__]

    def add(
        self,
        collectives: int = 0,
        bytes: Any = 0,
        least: Any = 0,
        unique: Any = 0,
    ) -> None:
        """Adds numbers, or scalars int64."""
        if tf.compat.v1.get_default_graph() is not self._graph:
            return
        added = (collectives, bytes, least, unique)
        for terms, number in zip(self._terms, added, strict=True):
            if not (isinstance(number, int) and number == 0):
                terms.append(number)

    def total(self) -> tf.Tensor | None:
        """The sums, [4] int64; None: nothing was added."""
        if not any(self._terms):
            return None
        sums = []
        for terms in self._terms:
            known = sum(n for n in terms if isinstance(n, int))
            found = [n for n in terms if not isinstance(n, int)]
            sums.append(tf.add_n([*found, tf.constant(known, tf.int64)]))
        return tf.stack(sums)
