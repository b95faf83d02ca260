"""A table whose rows are spread over replicas, seen as one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.engines.whole import WholeTable
from tfrs_embed.ops.update import scatter_update

#: Rows come from other workers in blocks of this many float32 numbers.
BLOCK_ELEMENTS = 1 << 22


class ShardedTable(WholeTable):
    """A table, or a slot, whose row i is row i // world of shard i % world.

    With several workers, reading it (also into a checkpoint) gathers the rows
    of all: all workers must do it, as all workers save Keras's variables.

    Args:
        name: the name, "<table>/parameters" or "<table>/<slot>".
        shape: [vocabulary_size, dim].
        shards: the variables of this process's replicas.
        replicas: the replicas.
        strategy: the strategy it was made under.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        shards: Sequence[tf.Variable],
        replicas: Replicas,
        strategy: tf.distribute.Strategy,
    ) -> None:
        super().__init__(name, shape, shards, strategy)
        self.shards = tuple(shards)
        self._replicas = replicas
        self._slot = replicas.allocate(1)
        # One function for all tables would be traced for each, and TensorFlow
        # warns of that.
        self._gather = tf.function(self._gather_block, autograph=False)

    def numpy(self) -> np.ndarray:
        """The whole table, [vocabulary_size, dim] float32."""
        world, (vocabulary_size, dim) = self._replicas.world, self.shape
        num_rows = self.shards[0].shape[0]
        whole = np.empty((num_rows, world, dim), np.float32)
        if self._replicas.workers == 1:
            for rank, shard in zip(
                self._replicas.ranks, self.shards, strict=True
            ):
                whole[:, rank] = shard.numpy()
        else:
            size = min(num_rows, max(1, BLOCK_ELEMENTS // dim))
            for start in range(0, num_rows, size):
                # The last block overlaps the one before: all have one shape.
                start = min(start, num_rows - size)
                block = self._gather(tf.constant(start), size).numpy()
                whole[start : start + size] = block.reshape(
                    world, size, dim
                ).swapaxes(0, 1)
        return whole.reshape(-1, dim)[:vocabulary_size]

    def _gather_block(self, start: tf.Tensor, size: int) -> tf.Tensor:
        """Rows start to start + size of all shards, [world * size, dim]."""
        rows = [
            self._replicas.gather(
                i, tf.gather(shard, start + tf.range(size)), self._slot
            )
            for i, shard in enumerate(self.shards)
        ]
        return rows[0]

    def _write(self, value: tf.Tensor) -> None:
        world = self._replicas.world
        for rank, shard in zip(self._replicas.ranks, self.shards, strict=True):
            with tf.device(shard.device):
                rows = value[rank::world]
                scatter_update(shard, tf.range(tf.shape(rows)[0]), rows)
