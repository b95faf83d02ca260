"""The state of a table whose rows belong to keys."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from tfrs_embed.checkpoint.rows import KEYS
from tfrs_embed.engines.tables.column import Column
from tfrs_embed.engines.tables.keyed_rows import KeyedRows
from tfrs_embed.engines.tables.state import TableState


class HashedTable(TableState):
    """A table by key: its keys, their rows and the rows' slots.

    A checkpoint holds them as `<table>/keys`, [n] int64, `<table>/parameters`
    and `<table>/<slot>`, [n, dim] in the same order, whichever it is; of a slot
    that has one number for each row, [n].

    Args:
        spec: the table.
        optimizer: the table's optimizer; None: it is not trained.
    """

    def expose(self, rows: KeyedRows, strategy: tf.distribute.Strategy) -> None:
        """Adds keys, rows and slots; those restored before are written now."""
        table = self.spec.name
        # The others are written in the order of the keys that are there, so
        # these come first: here, in checkpoints, among Keras's weights.
        keys = rows.tables
        self.add(
            KEYS,
            Column(f"{table}/{KEYS}", tf.int64, (None,), keys, rows, strategy),
        )
        for name in rows.names:
            self.add(
                name,
                Column(
                    f"{table}/{name}",
                    tf.float32,
                    (None, *rows.row_shape(name)),
                    rows.variables(name),
                    rows,
                    strategy,
                ),
            )

    @property
    def slots(self) -> dict[str, Any]:
        """The slots by name: of the rows' shape, or a number for each row."""
        return {k: v for k, v in super().slots.items() if k != KEYS}
