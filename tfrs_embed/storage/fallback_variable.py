"""The rows that keys without a row share, as one variable of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader, TensorSlice, blocks
from tfrs_embed.checkpoint.rows import FALLBACK, Save, other_slot
from tfrs_embed.storage.key_rules import FIRST_ROW
from tfrs_embed.storage.keyed_shard import KeyedShard
from tfrs_embed.storage.sharded import Part, ShardedVariable
from tfrs_embed.storage.table_keys import TableKeys


class FallbackVariable(ShardedVariable):
    """The fallback rows of a table with keys, or a slot of these rows.

    Row g of n shards is row g // n of shard g % n. Each checkpoint holds all of
    them, and so does each delta.

    Args:
        table: the table's name.
        part: "parameters" or a slot's name.
        rows: the table's keys and rows.
        strategy: the strategy under which the table was made.
    """

    # Tables without fallback rows save none.
    optional = True

    def __init__(
        self,
        table: str,
        part: str,
        rows: TableKeys,
        strategy: tf.distribute.Strategy,
    ) -> None:
        count, world = rows.rules.fallback_rows, rows.rules.world
        parts = {
            rank: Part(range(rank, count, world), offset=FIRST_ROW)
            for rank in range(world)
        }
        shards: dict[int, KeyedShard] = dict(rows.by_rank)
        variables = {rank: s.variables[part] for rank, s in shards.items()}
        row = next(iter(variables.values())).shape[1:]
        super().__init__(
            f"{table}/{FALLBACK}{part}",
            (count, *row),
            [(parts[rank], variable) for rank, variable in variables.items()],
            strategy,
            replicas=rows.replicas if world > 1 else None,
            parts=parts,
        )

    def local(self) -> tuple[Any, Sequence[tf.Variable]]:
        return None, ()  # The variables have the rows of keys, too.

    def check_value(self, value: Any) -> None:
        """Accepts any value of the variable's shape."""

    def slices(self, key: str, save: Save) -> Iterator[TensorSlice]:
        if save.in_background:
            return
        shape = self.shape.as_list()
        for start, size in blocks(shape, self.dtype):
            # All workers read; the chief writes.
            rows = self.read_rows(start, size)
            if self.replicas is None or self.replicas.worker == 0:
                yield TensorSlice(key, rows, shape, start)

    def check(self, key: str, reader: BundleReader) -> None:
        there, here = reader.shapes[key], self.shape.as_list()
        if there != here or not reader.dtypes[key].is_floating:
            raise ValueError(
                f"'{self.name}' can't be restored from '{reader.prefix}': it "
                f"has the shape {here} here, and {there} of "
                f"{reader.dtypes[key].name} there. The rows that keys without "
                "a row share are found by their number, so fallback_rows must "
                f"stay.{other_slot(here, there)}"
            )
