"""Clips tables' gradients by norms over many rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfrs_embed.optimizers.options import factor
from tfrs_embed.optimizers.rules import TableOptimizer

#: Takes the sums of squares of gradients on one shard, by table; returns the
#: factor for the gradients of each table with a norm.
Factors = Callable[[Mapping[str, tf.Tensor]], dict[str, tf.Tensor]]
#: Sums numbers, float32 of a fixed shape, over all shards.
Total = Callable[[tf.Tensor], tf.Tensor]


def norm_factors(
    optimizers: Mapping[str, TableOptimizer | None],
    total: Total = tf.identity,
) -> Factors | None:
    """The function that clips a step's gradients; None: no table has a norm.

    Args:
        optimizers: each table's optimizer by name; None: it is not trained.
        total: sums [tables] over all shards.
    """
    clipped = {
        name: optimizer
        for name, optimizer in optimizers.items()
        if optimizer is not None and optimizer.options.norm is not None
    }
    if not clipped:
        return None

    def factors(squares: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
        # A shard may have no part of a table.
        all_squares = total(tf.stack([squares.get(t, 0.0) for t in clipped]))
        by_table = dict(zip(clipped, tf.unstack(all_squares), strict=True))
        found = {}
        for table, optimizer in clipped.items():
            together = [table]
            if optimizer.options.clipnorm is None:  # It is a global_clipnorm.
                together = [t for t, o in clipped.items() if o is optimizer]
            square = tf.add_n([by_table[t] for t in together])
            found[table] = factor(square, optimizer.options.norm or 0.0)
        return found

    return factors


def require_together(
    optimizers: Sequence[Mapping[str, TableOptimizer | None]],
) -> None:
    """Raises a ValueError if two engines have tables of one global_clipnorm.

    Args:
        optimizers: for each engine its tables' optimizers, by table.
    """
    first: dict[int, tuple[int, str]] = {}
    for engine, of_engine in enumerate(optimizers):
        for table, optimizer in of_engine.items():
            limit = optimizer and optimizer.options.global_clipnorm
            if limit is None:
                continue
            there, other = first.setdefault(id(optimizer), (engine, table))
            if there != engine:
                raise ValueError(
                    f"Tables '{other}' and '{table}' share an optimizer with "
                    f"global_clipnorm={limit!r}, and are placed differently: "
                    "the norm can't be summed over both. Give the tables one "
                    "placement, or each an optimizer of its own, or use "
                    "clipnorm, which is for each table."
                )
