"""A table whose rows are spread over replicas, seen as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.training.saving.saveable_object import SaveSpec

from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.engines.shard import Shard
from tfrs_embed.ops.update import scatter_update

# What a variable's value is called in a checkpoint.
_VALUE = "VARIABLE_VALUE"

# Rows go to and from other workers in blocks of this many float32 numbers.
_BLOCK_ELEMENTS = 1 << 22


class ShardedTable(tf.__internal__.tracking.Trackable):
    """A table, or a slot, whose row i is row i // world of shard i % world.

    It has those parts of a variable's interface that see it whole, and a
    checkpoint holds it whole, as if it were one variable.

    With several workers, reading it (also into a checkpoint) gathers the rows
    of all: all workers must do it, as all workers save Keras's variables.

    Args:
        name: the name, "<table>/parameters" or "<table>/<slot>".
        shape: [vocabulary_size, dim].
        shards: the variables of this process's replicas.
        replicas: the replicas.
        strategy: the strategy it was made under.
    """

    trainable = False
    dtype = tf.float32

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        shards: Sequence[tf.Variable],
        replicas: Replicas,
        strategy: tf.distribute.Strategy,
    ) -> None:
        self.name = f"{name}:0"
        self.shape = tf.TensorShape(shape)
        self.shards = tuple(shards)
        self._replicas = replicas
        self._slot = replicas.allocate(1)
        # Where Keras looks whether a weight is of its strategy.
        self._distribute_strategy = strategy

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
            size = min(num_rows, max(1, _BLOCK_ELEMENTS // dim))
            for start in range(0, num_rows, size):
                # The last block overlaps the one before: all have one shape.
                start = min(start, num_rows - size)
                block = self._gather(tf.constant(start), size).numpy()
                whole[start : start + size] = block.reshape(
                    world, size, dim
                ).swapaxes(0, 1)
        return whole.reshape(-1, dim)[:vocabulary_size]

    @tf.function(autograph=False)
    def _gather(self, start: tf.Tensor, size: int) -> tf.Tensor:
        """Rows start to start + size of all shards, [world * size, dim]."""
        rows = [
            self._replicas.gather(
                i, tf.gather(shard, start + tf.range(size)), self._slot
            )
            for i, shard in enumerate(self.shards)
        ]
        return rows[0]

    def assign(self, value: Any) -> None:
        """Sets the whole table.

        Args:
            value: [vocabulary_size, dim], the same on all workers. Each takes
                the rows that it holds.

        Raises:
            ValueError: another shape.
        """
        with tf.device("CPU:0"):
            value = tf.convert_to_tensor(value, tf.float32)
            if value.shape.rank is None:  # Restoring, in a traced function.
                fits = tf.reduce_all(tf.equal(tf.shape(value), self.shape))
                checked = tf.debugging.Assert(
                    fits,
                    [
                        f"'{self.name}' has the shape {tuple(self.shape)}, and "
                        "can't be given a value of shape",
                        tf.shape(value),
                    ],
                )
                with tf.control_dependencies([checked]):
                    value = tf.reshape(value, self.shape)
            if value.shape != self.shape:
                raise ValueError(
                    f"'{self.name}' has the shape {tuple(self.shape)}, and "
                    f"can't be given a value of shape {tuple(value.shape)}."
                )
        world = self._replicas.world
        for rank, shard in zip(self._replicas.ranks, self.shards, strict=True):
            with tf.device(shard.device):
                rows = value[rank::world]
                scatter_update(shard, tf.range(tf.shape(rows)[0]), rows)

    def read(self) -> tf.Tensor:
        """The whole table as a tensor in the host's memory."""
        with tf.init_scope(), tf.device("CPU:0"):
            return tf.constant(self.numpy())

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """The whole table."""
        return self.numpy().astype(dtype or np.float32, copy=False)

    def __repr__(self) -> str:
        """Name, shape and sharding."""
        return (
            f"<ShardedTable '{self.name}' shape={tuple(self.shape)}, "
            f"{len(self.shards)} of {self._replicas.world} shards here>"
        )

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {_VALUE: _read_when_saving(self)}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        self.assign(restored_tensors[_VALUE])


def _to_tensor(
    value: ShardedTable, dtype: Any = None, name: Any = None, as_ref: Any = None
) -> tf.Tensor:
    rows = value.read()
    return rows if dtype is None else tf.cast(rows, dtype)


tf.register_tensor_conversion_function(ShardedTable, _to_tensor)


class ShardedStep(tf.__internal__.tracking.Trackable):
    """The number of updates made, kept by each shard, seen as one.

    Restoring it drops pending updates, as a one-device engine's step does.

    Args:
        shards: this process's shards.
        strategy: the strategy it was made under.
    """

    trainable = False
    dtype = tf.int64
    shape = tf.TensorShape(())
    name = "step:0"

    def __init__(
        self, shards: Sequence[Shard], strategy: tf.distribute.Strategy
    ) -> None:
        self._shards = tuple(shards)
        self._distribute_strategy = strategy

    def numpy(self) -> np.int64:
        """The number."""
        return self._shards[0].step.numpy()

    def assign(self, value: Any) -> None:
        """Sets the number on all shards."""
        for shard in self._shards:
            shard.step.assign(tf.cast(value, tf.int64))

    def read(self) -> tf.Tensor:
        """The number, a scalar tensor."""
        return tf.convert_to_tensor(self._shards[0].step)

    def _serialize_to_tensors(self) -> dict[str, Any]:
        return {_VALUE: _read_when_saving(self)}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        for shard in self._shards:
            shard.drop_pending()
        self.assign(restored_tensors[_VALUE])


def _read_when_saving(value: ShardedTable | ShardedStep) -> SaveSpec:
    # Restoring asks for what there is to save, too, and must not read it.
    return SaveSpec(
        tensor=value.read,
        slice_spec="",
        name="",
        dtype=value.dtype,
        device="/device:CPU:0",
    )


def _step_to_tensor(
    value: ShardedStep, dtype: Any = None, name: Any = None, as_ref: Any = None
) -> tf.Tensor:
    return value.read()


tf.register_tensor_conversion_function(ShardedStep, _step_to_tensor)
