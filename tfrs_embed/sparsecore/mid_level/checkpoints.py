"""Checkpoints of stacks; a checkpoint fits one layout only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import (
    sparse_core_layout_pb2,
    tpu_embedding_v3_utils,
)

#: The name that the layouts are saved under.
LAYOUTS_KEY = tpu_embedding_v3_utils.SPARSECORE_LAYOUTS_CHECKPOINT_KEY
# The fields that a row's place depends on; the others depend on the batch.
_FIELDS = (
    "stacked_table_name",
    "num_sparse_cores",
    "num_partitions",
    "total_rows_per_sparse_core_shard",
    "sparse_core_shard_row_offset",
    "sparse_core_shard_rotation",
)


def layouts_to_save(layouts: Mapping[str, Any]) -> Any:
    """The object that TensorFlow's class saves as `LAYOUTS_KEY`."""
    proto = sparse_core_layout_pb2.SparseCoreTableLayouts()
    proto.tables.extend(layouts.values())
    return tpu_embedding_v3_utils.SparseCoreLayoutsTrackable(
        tf.constant(proto.SerializeToString(), tf.string)
    )


def check_layouts(path: str, layouts: Mapping[str, Any]) -> None:
    """Raises a ValueError for a checkpoint of these tables in another layout.

    Stacks of other layouts may have the same shapes: rows would be restored
    into the places of other rows.
    """
    reader = tf.train.load_checkpoint(path)
    wrong = None
    for key in reader.get_variable_to_dtype_map():
        if f"{LAYOUTS_KEY}/" not in key:
            continue
        saved = sparse_core_layout_pb2.SparseCoreTableLayouts()
        saved.ParseFromString(reader.get_tensor(key))
        tables = {table.table_name: table for table in saved.tables}
        if set(tables) != set(layouts):
            continue  # It is another embedding's.
        fields = [
            (name, f, getattr(tables[name], f), getattr(layout, f))
            for name, layout in layouts.items()
            for f in _FIELDS
        ]
        differences = [
            f"table '{name}' has {field} {there}, here {here}"
            for name, field, there, here in fields
            if there != here
        ]
        if not differences:
            return
        wrong = differences[0]
    if wrong is not None:
        raise ValueError(
            f"Checkpoint '{path}' has another layout: {wrong}. Restore it on "
            "the topology, and with the table stacking, that it was saved with."
        )
