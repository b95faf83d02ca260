"""A table whose rows belong to keys, seen whole and by key.

A key's row depends on who asked for it when, and on the number of replicas;
none of that is of interest outside. Keys, rows and slots are therefore read and
written in the order of the keys.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.engines.engine import TableState
from tfrs_embed.engines.key_map import KeyMap
from tfrs_embed.engines.sharded_table import BLOCK_ELEMENTS
from tfrs_embed.engines.whole import Whole
from tfrs_embed.ops.update import scatter_update

KEYS = "keys"


class HashedTable(TableState):
    """A table by key: its keys, their rows and the rows' slots.

    A checkpoint holds them as `<table>/keys`, [n] int64 and ascending,
    `<table>/parameters` and `<table>/<slot>`, [n, dim] in the same order.

    Args:
        spec: the table.
    """

    def expose(self, rows: KeyedRows, strategy: tf.distribute.Strategy) -> None:
        """Adds what there is to see; what was restored before is written."""
        table, dim = self.spec.name, self.spec.dim
        # The others are written in the order of the keys that are there, so
        # these come first: here, in checkpoints, among Keras's weights.
        keys = Column(
            f"{table}/{KEYS}",
            tf.int64,
            (None,),
            rows.tables,
            rows.read_keys,
            rows.write_keys,
            strategy,
        )
        self.add(KEYS, keys)
        for name in rows.names:
            self.add(
                name,
                Column(
                    f"{table}/{name}",
                    tf.float32,
                    (None, dim),
                    rows.variables(name),
                    functools.partial(rows.read, name),
                    functools.partial(rows.write, name),
                    strategy,
                    keys,
                ),
            )

    @property
    def slots(self) -> dict[str, Any]:
        """The slots by name, each of the rows' shape."""
        return {k: v for k, v in super().slots.items() if k != KEYS}


class Column(Whole):
    """The keys, the rows or a slot of all shards, in the order of the keys.

    It has those parts of a variable's interface that see it whole.

    With several workers, reading it (also into a checkpoint) gathers the rows
    of all: all workers must do it. Writing it is each worker's own business:
    it takes what it holds of a value that is the same on all.

    Args:
        name: the name, "<table>/keys" or the like.
        dtype: the dtype.
        shape: the static shape.
        shards: what this process's shards keep it in.
        read: returns the value.
        write: sets it.
        strategy: the strategy it was made under.
        keys: the keys that a value to write is for; None: these are they.
    """

    def __init__(
        self,
        name: str,
        dtype: tf.DType,
        shape: tuple[int | None, ...],
        shards: Sequence[Any],
        read: Callable[[], np.ndarray],
        write: Callable[[np.ndarray], None],
        strategy: tf.distribute.Strategy,
        keys: Column | None = None,
    ) -> None:
        super().__init__(shards, strategy)
        self.name = f"{name}:0"
        self.dtype = dtype
        self.shape = tf.TensorShape(shape)
        self._read = read
        self._write = write
        self._keys = keys
        # Of the keys: the restore they were last written in, the operation
        # that does it, and what has to wait for it.
        self._restored = -1
        self._operation: tf.Operation | None = None
        self._waiting: list[tuple[Column, int, tf.Tensor]] = []

    def numpy(self) -> np.ndarray:
        """The whole value."""
        return self._read()

    def assign(self, value: Any) -> None:
        """Sets the whole value.

        Args:
            value: keys replace all that there are, and their rows and slots
                become initial ones; rows and slots are those of the keys that
                there are.

        Raises:
            ValueError: another shape, keys that are not ascending, or more keys
                than a shard has rows for.
        """
        self._write(np.asarray(value))

    def __repr__(self) -> str:
        """Name, shape and dtype."""
        return (
            f"<Column '{self.name}' shape={tuple(self.shape)} "
            f"dtype={self.dtype.name}>"
        )

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        if not restored_tensors:
            return
        [value] = restored_tensors.values()
        restore = self._update_uid
        keys = self._keys or self
        if keys._update_uid != restore:
            raise ValueError(
                f"'{self.name}' can't be restored: the checkpoint has no keys "
                "for its rows. It is of a layer with use_hashtable=False."
            )
        if self is keys:
            self._restored = restore
            self._restore(value)
            waiting, self._waiting = self._waiting, []
            for column, its_restore, its_value in waiting:
                if its_restore == restore:
                    column._restore(its_value)
        elif keys._restored == restore:
            self._restore(value)
        else:
            # TensorFlow restores in an order of its own.
            keys._waiting.append((self, restore, value))

    def _restore(self, value: tf.Tensor) -> None:
        if tf.executing_eagerly():
            self.assign(value)
            return
        # Under a strategy TensorFlow restores in a function.
        after = self._keys and self._keys._operation
        with tf.control_dependencies([after] if after else []):
            self._operation = tf.py_function(self.assign, [value], [])


class KeyedRows:
    """The rows of this process's shards, by key.

    Args:
        owner: whose they are, for errors.
        capacity: the rows of a shard.
        dim: the width of a row.
        maps: the shards' keys.
        variables: the shards' variables by name: parameters and slots.
        replicas: the replicas.
        reset: gives all shards their initial rows and slots.
    """

    def __init__(
        self,
        owner: str,
        capacity: int,
        dim: int,
        maps: Sequence[KeyMap],
        variables: Sequence[Mapping[str, tf.Variable]],
        replicas: Replicas,
        reset: Callable[[], None],
    ) -> None:
        self.names = tuple(variables[0])
        self._owner = owner
        self._capacity = capacity
        self._dim = dim
        self._maps = tuple(maps)
        self._variables = tuple(variables)
        self._replicas = replicas
        self._reset = reset
        # Of the sizes, the keys and the rows.
        self._slot = replicas.allocate(3)
        self._written = np.zeros([0], np.int64)

    @property
    def tables(self) -> list[Any]:
        """The shards' keys, as TensorFlow tracks them."""
        return [key_map.resource for key_map in self._maps]

    def variables(self, name: str) -> list[tf.Variable]:
        """The shards' parameters or slot."""
        return [variables[name] for variables in self._variables]

    def read_keys(self) -> np.ndarray:
        """All keys, [n] int64, ascending."""
        return np.sort(np.concatenate(self._all_keys()))

    def read(self, name: str) -> np.ndarray:
        """The parameters or a slot of all keys, [n, dim] float32."""
        keys = np.concatenate(self._all_keys())
        return np.concatenate(self._all_rows(name))[np.argsort(keys)]

    def sizes(self) -> list[int]:
        """The number of keys of each shard.

        With several workers all must ask.
        """
        sizes = [key_map.size() for key_map in self._maps]
        if self._replicas.workers == 1:
            return [int(size) for size in self._by_rank(sizes)]
        return self._gather([s[None] for s in sizes], self._slot).tolist()

    def write_keys(self, keys: np.ndarray) -> None:
        """Replaces all keys; their rows and slots are initial ones.

        Args:
            keys: [n] int64, ascending, of all shards.

        Raises:
            ValueError: they are not, or a shard has no room for its keys.
        """
        if keys.dtype != np.int64 or keys.ndim != 1:
            raise ValueError(
                f"{self._owner}: keys must be int64 of shape [n], got "
                f"{keys.dtype} of shape {list(keys.shape)}."
            )
        if not np.all(keys[1:] > keys[:-1]):
            raise ValueError(
                f"{self._owner}: keys must be ascending, each of them once."
            )
        world = self._replicas.world
        shard_of = np.mod(keys, world)
        sizes = np.bincount(shard_of, minlength=world)
        fullest = int(np.argmax(sizes))
        if sizes[fullest] > self._capacity:
            raise ValueError(
                f"{self._owner} has no room for {len(keys)} keys: over {world} "
                f"replicas shard {fullest} would hold {sizes[fullest]} of "
                f"them, and max_vocabulary_size_per_gpu is {self._capacity}."
            )
        if any(int(key_map.size()) for key_map in self._maps):
            self._reset()
        for rank, key_map in zip(self._replicas.ranks, self._maps, strict=True):
            key_map.replace(keys[shard_of == rank])
        self._written = keys

    def write(self, name: str, values: np.ndarray) -> None:
        """Sets the parameters or a slot of all keys.

        Args:
            name: which of them.
            values: [n, dim] float32, in the order of the keys.

        Raises:
            ValueError: another shape.
            RuntimeError: with several workers, keys came since `write_keys`.
        """
        keys = self._keys_to_write_for()
        if values.shape != (len(keys), self._dim):
            raise ValueError(
                f"{self._owner} holds {len(keys)} keys: its {name} have the "
                f"shape {[len(keys), self._dim]}, and can't be given a value "
                f"of shape {list(values.shape)}."
            )
        shard_of = np.mod(keys, self._replicas.world)
        for rank, key_map, variables in zip(
            self._replicas.ranks, self._maps, self._variables, strict=True
        ):
            mine = np.flatnonzero(shard_of == rank)
            rows = key_map.find(tf.constant(keys[mine], tf.int64))
            with tf.device(variables[name].device):
                scatter_update(
                    variables[name], rows, tf.constant(values[mine], tf.float32)
                )

    def _keys_to_write_for(self) -> np.ndarray:
        if self._replicas.workers == 1:
            return self.read_keys()
        # A restoring worker can't ask the others, which may not be restoring.
        shard_of = np.mod(self._written, self._replicas.world)
        for rank, key_map in zip(self._replicas.ranks, self._maps, strict=True):
            if int(key_map.size()) != np.sum(shard_of == rank):
                raise RuntimeError(
                    f"{self._owner} has been given keys since they were "
                    "written: write the keys before their rows."
                )
        return self._written

    def _all_keys(self) -> list[np.ndarray]:
        """Each shard's keys by row, in the order of the ranks."""
        held = [key_map.keys() for key_map in self._maps]
        if self._replicas.workers == 1:
            return self._by_rank(held)

        def block(start: int, size: int) -> list[np.ndarray]:
            parts = [keys[start : start + size] for keys in held]
            return [np.pad(p, (0, size - len(p))) for p in parts]

        return self._in_blocks(block, self._slot + 1)

    def _all_rows(self, name: str) -> list[np.ndarray]:
        """Each shard's rows that keys have, in the order of the ranks."""
        held = self.variables(name)
        if self._replicas.workers == 1:
            sizes = [int(key_map.size()) for key_map in self._maps]
            return self._by_rank(
                [
                    tf.gather(v, tf.range(n)).numpy()
                    for v, n in zip(held, sizes, strict=True)
                ]
            )

        def block(start: int, size: int) -> list[tf.Tensor]:
            # What is beyond the last row is cut off again.
            rows = tf.minimum(start + tf.range(size), self._capacity - 1)
            return [tf.gather(v, rows) for v in held]

        return self._in_blocks(block, self._slot + 2)

    def _by_rank(self, held: Sequence[Any]) -> list[Any]:
        """Sorts what all shards hold, where all are here."""
        ranks = self._replicas.ranks
        return [held[ranks.index(rank)] for rank in range(len(ranks))]

    def _in_blocks(
        self, block: Callable[[int, int], list[Any]], slot: int
    ) -> list[np.ndarray]:
        """Gathers all shards' values, each as long as it has keys."""
        sizes = self.sizes()
        size = min(self._capacity, max(1, BLOCK_ELEMENTS // self._dim))
        parts: list[list[np.ndarray]] = [[] for _ in sizes]
        # Once at least, for the shape of no rows.
        for start in range(0, max(1, *sizes), size):
            gathered = self._gather(block(start, size), slot)
            for part, rows in zip(
                parts, np.split(gathered, len(sizes)), strict=True
            ):
                part.append(rows)
        return [
            np.concatenate(part)[:n]
            for part, n in zip(parts, sizes, strict=True)
        ]

    def _gather(self, values: list[Any], slot: int) -> np.ndarray:
        """Gathers the local replicas' values, of one shape, from all."""
        tensors = [tf.convert_to_tensor(v) for v in values]
        return self._collect(tensors, slot).numpy()

    @tf.function(autograph=False)
    def _collect(self, values: list[tf.Tensor], slot: int) -> tf.Tensor:
        gathered = [
            self._replicas.gather(i, value, slot)
            for i, value in enumerate(values)
        ]
        return gathered[0]
