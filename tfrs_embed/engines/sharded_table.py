"""A table whose rows are spread over replicas, seen as one."""

from __future__ import annotations

import abc
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

#: Rows come from other workers in blocks of this many float32 numbers.
BLOCK_ELEMENTS = 1 << 22


class Whole(tf.__internal__.tracking.Trackable):
    """Variables of several shards, seen as one.

    A checkpoint holds the whole. A SavedModel holds the variables instead: its
    functions read those.

    Args:
        variables: the variables of this process's shards.
        strategy: the strategy they were made under.
    """

    trainable = False
    dtype: tf.DType
    name: str

    def __init__(
        self,
        variables: Sequence[tf.Variable],
        strategy: tf.distribute.Strategy,
    ) -> None:
        self._variables = list(variables)
        # Where Keras looks whether a weight is of its strategy.
        self._distribute_strategy = strategy

    def __setattr__(self, name: str, value: Any) -> None:
        # Keras would put the functions of a SavedModel that it loads here,
        # which know the shards' own variables only.
        if name not in ("_serialize_to_tensors", "_restore_from_tensors"):
            super().__setattr__(name, value)

    @property
    def _shared_name(self) -> str:
        """What a variable is called in a checkpoint's description."""
        return self.name.split(":")[0]

    @abc.abstractmethod
    def numpy(self) -> Any:
        """The whole, as numpy has it."""

    def read(self) -> tf.Tensor:
        """The whole, as a tensor in the host's memory."""
        with tf.init_scope(), tf.device("CPU:0"):
            return tf.constant(self.numpy())

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        """The whole."""
        value = np.asarray(self.numpy())
        return value.astype(dtype or value.dtype, copy=False)

    @abc.abstractmethod
    def assign(self, value: Any) -> None:
        """Sets the whole."""

    def _serialize_to_tensors(self) -> dict[str, Any]:
        if not tf.executing_eagerly():
            return {}  # A SavedModel is being made.
        # By its full name the host is the device that TensorFlow has other
        # variables on; with several it would save and restore in a function.
        with tf.init_scope(), tf.device("CPU:0"):
            host = tf.zeros([]).device
        # Restoring asks for what there is to save, too, and must not read it.
        whole = SaveSpec(
            tensor=self.read,
            slice_spec="",
            name="",
            dtype=self.dtype,
            device=host,
        )
        return {_VALUE: whole}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        if restored_tensors:
            self.assign(restored_tensors[_VALUE])

    def _trackable_children(
        self, save_type: str = "checkpoint", **kwargs: Any
    ) -> dict[str, Any]:
        children = super()._trackable_children(save_type, **kwargs)
        if save_type == "savedmodel":
            for i, variable in enumerate(self._variables):
                children[f"shard_{i}"] = variable
        return children


def _to_tensor(
    value: Whole, dtype: Any = None, name: Any = None, as_ref: Any = None
) -> tf.Tensor:
    tensor = value.read()
    return tensor if dtype is None else tf.cast(tensor, dtype)


tf.register_tensor_conversion_function(Whole, _to_tensor)


# Keras's HDF5 format takes nothing else.
tf.Variable.register(Whole)


class ShardedTable(Whole):
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

    dtype = tf.float32

    def __init__(
        self,
        name: str,
        shape: tuple[int, int],
        shards: Sequence[tf.Variable],
        replicas: Replicas,
        strategy: tf.distribute.Strategy,
    ) -> None:
        super().__init__(shards, strategy)
        self.name = f"{name}:0"
        self.shape = tf.TensorShape(shape)
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

    def __repr__(self) -> str:
        """Name, shape and sharding."""
        return (
            f"<ShardedTable '{self.name}' shape={tuple(self.shape)}, "
            f"{len(self.shards)} of {self._replicas.world} shards here>"
        )


class ShardedStep(Whole):
    """The number of updates made, kept by each shard, seen as one.

    Restoring it drops pending updates, as a one-device engine's step does.

    Args:
        shards: this process's shards.
        strategy: the strategy it was made under.
    """

    dtype = tf.int64
    shape = tf.TensorShape(())
    name = "step:0"

    def __init__(
        self, shards: Sequence[Shard], strategy: tf.distribute.Strategy
    ) -> None:
        super().__init__([s.step for s in shards], strategy)
        self._shards = tuple(shards)

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

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        for shard in self._shards:
            shard.drop_pending()
        super()._restore_from_tensors(restored_tensors)
