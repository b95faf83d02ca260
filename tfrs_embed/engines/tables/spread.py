"""Tables that are spread over replicas, seen as one: what all kinds share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.distribution import waits
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.engines.tables.composite import CompositeTable
from tfrs_embed.graphs import TracedOnce

#: Rows come from other workers in blocks of this many float32 numbers.
BLOCK_ELEMENTS = 1 << 22


class SpreadTable(CompositeTable):
    """A table, or a slot, of which each replica has a part, or nothing.

    Args:
        name: the name, "<table>/parameters" or "<table>/<slot>".
        shape: [vocabulary_size, dim], or [vocabulary_size] of a slot that has
            one number for each row.
        parts: the variables of this process's replicas.
        replicas: the replicas.
        strategy: the strategy it was made under.
        dtype: the dtype of its numbers.
    """

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        parts: Sequence[tf.Variable],
        replicas: Replicas,
        strategy: tf.distribute.Strategy,
        dtype: tf.DType = tf.float32,
    ) -> None:
        super().__init__(name, shape, parts, strategy, dtype)
        self._replicas = replicas

    @property
    def _workers(self) -> int:
        return self._replicas.workers

    @property
    def nbytes(self) -> int:
        """See the base class: each worker writes about as much."""
        return super().nbytes // self._workers

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        if self._replicas.workers > 1:
            raise RuntimeError(
                f"'{self.name}' is sharded over {self._replicas.workers} "
                "workers, whose parts of a checkpoint are exchanged between "
                "steps: save without experimental_enable_async_checkpoint."
            )
        super()._copy_trackable_to_cpu(object_map)


class BlockFunction:
    """A function of the first row of a block, in a graph of its own.

    Args:
        function: takes the first row, a scalar int32. It runs collectives.
        replicas: the replicas, which call it together.
        action: what they do, "read 'movies/parameters'".
    """

    def __init__(
        self,
        function: Callable[[tf.Tensor], Any],
        replicas: Replicas,
        action: str,
    ) -> None:
        self._function = TracedOnce(function, tf.TensorSpec([], tf.int32))
        self._replicas = replicas
        self._action = action

    def __call__(self, start: int) -> Any:
        with waits.together(self._replicas, self._action):
            return self._function(tf.constant(start))
