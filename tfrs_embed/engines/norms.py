"""Clipping of tables' gradients by norms over many rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from tfrs_embed.optimizers.options import factor
from tfrs_embed.optimizers.rules import TableOptimizer

#: Takes the sums of squares of tables' gradients on one shard, by table, and
#: returns what the gradient of each table with a norm is multiplied by.
Factors = Callable[[Mapping[str, tf.Tensor]], dict[str, tf.Tensor]]


class Norms:
    """The norms by which the gradients of an engine's tables are clipped.

    Args:
        optimizers: each table's optimizer by name; None: it is not trained.
    """

    def __init__(self, optimizers: Mapping[str, TableOptimizer | None]) -> None:
        self._optimizers = {
            name: optimizer
            for name, optimizer in optimizers.items()
            if optimizer is not None and optimizer.options.norm is not None
        }

    def factors(
        self, total: Callable[[tf.Tensor], tf.Tensor] | None = None
    ) -> Factors | None:
        """What clips the gradients of a step; None: no table has a norm.

        Args:
            total: sums numbers, [tables] float32, over all shards; None: there
                is one.
        """
        if not self._optimizers:
            return None

        def factors(squares: Mapping[str, tf.Tensor]) -> dict[str, tf.Tensor]:
            # A shard may hold none of a table.
            all_squares = tf.stack([squares.get(t, 0.0) for t in self._tables])
            if total is not None:
                all_squares = total(all_squares)
            by_table = dict(
                zip(self._tables, tf.unstack(all_squares), strict=True)
            )
            return {
                table: factor(
                    tf.add_n([by_table[t] for t in self._together(table)]),
                    optimizer.options.norm or 0.0,
                )
                for table, optimizer in self._optimizers.items()
            }

        return factors

    @property
    def _tables(self) -> Sequence[str]:
        return list(self._optimizers)

    def _together(self, table: str) -> Sequence[str]:
        """The tables over whose rows a table's norm is."""
        optimizer = self._optimizers[table]
        if optimizer.options.clipnorm is not None:
            return [table]
        return [t for t, o in self._optimizers.items() if o is optimizer]


def require_together(
    optimizers: Sequence[Mapping[str, TableOptimizer | None]],
) -> None:
    """Requires that the tables of a norm are held by one engine.

    Args:
        optimizers: the optimizers of each engine's tables, by table.

    Raises:
        ValueError: two engines have tables of one `global_clipnorm`.
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
