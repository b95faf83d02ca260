"""The rows of shards, read and written by key.

A key's row depends on who asked for it when, and on the number of replicas;
none of that is of interest outside. Keys, rows and slots are therefore read and
written in the order of the keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from tfrs_embed.checkpoint.bundle import BundleReader, blocks
from tfrs_embed.checkpoint.rows import KEYS, HeldRows, held_rows, scatter
from tfrs_embed.checkpoint.session import Session
from tfrs_embed.distribution import waits
from tfrs_embed.distribution.key_shards import shards_of
from tfrs_embed.distribution.replicas import Replicas
from tfrs_embed.engines.tables.sharded import BLOCK_ELEMENTS
from tfrs_embed.graphs import TracedOnce
from tfrs_embed.ops.update import scatter_update


class Keys(Protocol):
    """The keys of one shard, and their rows."""

    @property
    def resource(self) -> Any:
        """What TensorFlow tracks."""

    def size(self) -> tf.Tensor:
        """The number of keys, a scalar int64."""

    def find(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the rows of keys that have one, [n] int64."""

    def keys(self) -> np.ndarray:
        """All keys, [size] int64, by row."""

    def rows(self) -> np.ndarray:
        """Their rows, [size] int64, ascending."""

    def replace(self, keys: np.ndarray) -> Any:
        """Forgets all keys, and gives ascending rows to others, [n] int64."""


class KeyedRows:
    """The rows of this process's shards, by key.

    Args:
        owner: whose they are, for errors.
        capacity: how many keys a shard has room for.
        limit: the setting that says so, for errors.
        remedy: what makes room for more, for errors.
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
        limit: str,
        remedy: str,
        dim: int,
        maps: Sequence[Keys],
        variables: Sequence[Mapping[str, tf.Variable]],
        replicas: Replicas,
        reset: Callable[[], None],
    ) -> None:
        self.names = tuple(variables[0])
        self._owner = owner
        self._capacity = capacity
        self._limit = limit
        self._remedy = remedy
        self._dim = dim
        self._maps = tuple(maps)
        self._variables = tuple(variables)
        self._replicas = replicas
        self._reset = reset
        # Of the sizes, the keys, the rows, and a number for each row.
        self._channel = replicas.allocate(4)
        self._collect: dict[Any, TracedOnce] = {}
        self._written = np.zeros([0], np.int64)
        #: The checkpoint that new keys were last read from, and their number.
        self.source: str | None = None
        self.num_new_keys = 0
        # New keys in the checkpoint's order, and once restored their shards.
        self._new_keys = np.zeros([0], np.int64)
        self._shard_of = np.zeros([0], np.int32)

    @property
    def has_one_shard(self) -> bool:
        """Whether there is one shard."""
        return self._replicas.world == 1

    @property
    def workers(self) -> int:
        """The number of processes that have shards."""
        return self._replicas.workers

    @property
    def tables(self) -> list[Any]:
        """The shards' keys, as TensorFlow tracks them."""
        return [key_map.resource for key_map in self._maps]

    def variables(self, name: str) -> list[tf.Variable]:
        """The shards' parameters or slot."""
        return [variables[name] for variables in self._variables]

    def row_shape(self, name: str) -> tuple[int, ...]:
        """The shape of a key's part of the parameters or a slot."""
        return tuple(self._variables[0][name].shape[1:])

    def read_keys(self) -> np.ndarray:
        """All keys, [n] int64, ascending."""
        return np.sort(np.concatenate(self._all_keys()))

    def read(self, name: str) -> np.ndarray:
        """The parameters or a slot of all keys, [n, dim] or [n] float32."""
        keys = np.concatenate(self._all_keys())
        return np.concatenate(self._all_rows(name))[np.argsort(keys)]

    def held(self, name: str) -> list[HeldRows]:
        """The parameters or a slot of this process's shards; no collective."""
        found = []
        for key_map, variables in zip(self._maps, self._variables, strict=True):
            numbers = key_map.rows()
            rows = held_rows(variables[name], len(numbers), numbers)
            found.append(dataclasses.replace(rows, keys=key_map.keys()))
        return found

    def key_counts(self) -> list[int]:
        """The number of keys of each shard.

        With several workers all must ask.
        """
        sizes = [key_map.size() for key_map in self._maps]
        if self._replicas.workers == 1:
            return [int(size) for size in self._by_rank(sizes)]
        return self._gather([s[None] for s in sizes], self._channel).tolist()

    def local_key_counts(self) -> dict[int, int]:
        """The number of keys of this process's shards, by their ranks."""
        return {
            rank: int(key_map.size())
            for rank, key_map in zip(
                self._replicas.ranks, self._maps, strict=True
            )
        }

    def write_keys(self, keys: np.ndarray) -> None:
        """Replaces all keys; their rows and slots are initial ones.

        Args:
            keys: [n] int64, ascending, of all shards.

        Raises:
            ValueError: they are not, or a shard has no room for its keys.
        """
        self.check_keys(keys)
        self._replace(keys)
        self._written = keys

    def check_keys(self, keys: np.ndarray) -> None:
        """Checks keys that are to be written.

        Raises:
            ValueError: as `write_keys` does.
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
        if not self._may_leave_out:
            self._require_room(keys)

    @property
    def _may_leave_out(self) -> bool:
        """Whether keys without room are left out."""
        return False

    def _require_room(self, keys: np.ndarray) -> None:
        """Requires room for keys, [n] int64, in all shards.

        Raises:
            ValueError: a shard has none.
        """
        shortage = self._shortage(shards_of(keys, self._replicas.world))
        if shortage:
            raise ValueError(
                f"{self._owner} has no room for {len(keys)} keys: {shortage}. "
                f"{self._remedy}"
            )

    def _shortage(self, shard_of: np.ndarray) -> str:
        """Says which shard has no room for its keys; "": all have.

        Args:
            shard_of: the keys' shards, [n] int32.
        """
        world = self._replicas.world
        sizes = np.bincount(shard_of, minlength=world)
        fullest = int(np.argmax(sizes))
        if sizes[fullest] <= self._capacity:
            return ""
        replicas = "1 replica" if world == 1 else f"{world} replicas"
        return (
            f"over {replicas} shard {fullest} would hold {sizes[fullest]} of "
            f"them, and {self._limit} is {self._capacity}"
        )

    def _replace(self, keys: np.ndarray) -> np.ndarray:
        """Replaces all keys; returns the shard of each, [n] int32."""
        shard_of = shards_of(keys, self._replicas.world)
        if any(int(key_map.size()) for key_map in self._maps):
            self._reset()
        for rank, key_map in zip(self._replicas.ranks, self._maps, strict=True):
            key_map.replace(keys[shard_of == rank])
        return shard_of

    def save(self, name: str, key: str, session: Session) -> None:
        """Writes the keys, the parameters or a slot, shard after shard.

        With several workers all must, and each writes what it holds.

        Args:
            name: which of them.
            key: the checkpoint's key.
            session: where to.
        """
        writer, sizes = session.writer(self._replicas), self.key_counts()
        row = () if name == KEYS else self.row_shape(name)
        shape = [sum(sizes), *row]
        if shape[0] == 0:
            if self._replicas.worker == 0:
                dtype = tf.int64 if name == KEYS else tf.float32
                writer.add(key, tf.zeros(shape, dtype))
            return
        for i, rank in enumerate(self._replicas.ranks):
            first = sum(sizes[:rank])
            if name == KEYS:
                keys = tf.constant(self._maps[i].keys())
                writer.add_blocks(key, keys, shape[0], first)
                continue
            numbers = self._maps[i].rows()
            for start, size in blocks([sizes[rank], *row], tf.float32):
                block = self._gather_rows(i, name, numbers, start, size)
                writer.add_rows(key, shape, first + start, block)

    def read_new_keys(self, key: str, reader: BundleReader) -> None:
        """Reads the keys that `restore_keys` is to put in the place of all.

        Args:
            key: the checkpoint's key.
            reader: the checkpoint.

        Raises:
            ValueError: they are no keys, or a shard has no room for its own.
        """
        shape, dtype = reader.shapes[key], reader.dtypes[key]
        where = f"{self._owner}: the keys of '{reader.prefix}'"
        if len(shape) != 1 or dtype != tf.int64:
            raise ValueError(
                f"{where} must be int64 of shape [n], got {dtype.name} of "
                f"shape {shape}."
            )
        keys = np.concatenate(
            [np.zeros([0], np.int64)]
            + [reader.read_rows(key, *b).numpy() for b in blocks(shape, dtype)]
        )
        if len(np.unique(keys)) != len(keys):
            raise ValueError(f"{where} must all differ.")
        self._require_room(keys)
        self.source, self.num_new_keys = reader.prefix, len(keys)
        self._new_keys = keys

    def restore_keys(self) -> None:
        """Replaces all keys by the new ones that were read.

        Their rows and slots are initial ones.
        """
        self._shard_of = self._replace(self._new_keys)
        self._new_keys = self._new_keys[:0]

    def restore(self, name: str, key: str, reader: BundleReader) -> None:
        """Reads the parameters or a slot of the keys last restored.

        Args:
            name: which of them.
            key: the checkpoint's key.
            reader: the checkpoint.
        """
        counts = [0] * len(self._maps)
        numbers = [key_map.rows() for key_map in self._maps]
        for start, size in blocks(reader.shapes[key], tf.float32):
            rows = reader.read_rows(key, start, size)
            shard_of = self._shard_of[start : start + size]
            for i, rank in enumerate(self._replicas.ranks):
                # A shard's keys have its rows in the order they are read in.
                mine = tf.gather(rows, np.flatnonzero(shard_of == rank))
                end = counts[i] + mine.shape[0]
                scatter(
                    self._variables[i][name],
                    tf.constant(numbers[i][counts[i] : end], tf.int64),
                    mine,
                )
                counts[i] = end

    def write(self, name: str, values: np.ndarray) -> None:
        """Sets the parameters or a slot of all keys.

        Args:
            name: which of them.
            values: [n, dim] float32, or [n] for a slot that has a number for
                each row, in the order of the keys.

        Raises:
            ValueError: another shape.
            RuntimeError: with several workers, keys came since `write_keys`.
        """
        keys = self._keys_to_write_for()
        shape = (len(keys), *self.row_shape(name))
        if values.shape != shape:
            raise ValueError(
                f"{self._owner} holds {len(keys)} keys: its {name} have the "
                f"shape {list(shape)}, and can't be given a value of shape "
                f"{list(values.shape)}."
            )
        shard_of = shards_of(keys, self._replicas.world)
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
        shard_of = shards_of(self._written, self._replicas.world)
        for rank, key_map in zip(self._replicas.ranks, self._maps, strict=True):
            if int(key_map.size()) != np.sum(shard_of == rank):
                raise RuntimeError(
                    f"{self._owner} has been given keys since they were "
                    "written: write the keys before their rows."
                )
        return self._written

    def _all_keys(self) -> list[np.ndarray]:
        """Each shard's keys by row, in the order of the ranks."""
        values = [key_map.keys() for key_map in self._maps]
        if self._replicas.workers == 1:
            return self._by_rank(values)

        def block(start: int, size: int) -> list[np.ndarray]:
            parts = [keys[start : start + size] for keys in values]
            return [np.pad(p, (0, size - len(p))) for p in parts]

        return self._in_blocks(block, self._channel + 1)

    def _all_rows(self, name: str) -> list[np.ndarray]:
        """Each shard's rows that keys have, in the order of the ranks."""
        numbers = [key_map.rows() for key_map in self._maps]
        if self._replicas.workers == 1:
            return self._by_rank(
                [
                    self._gather_rows(i, name, rows, 0, len(rows)).numpy()
                    for i, rows in enumerate(numbers)
                ]
            )

        def block(start: int, size: int) -> list[tf.Tensor]:
            # Rows beyond the last are cut off again.
            return [
                self._gather_rows(i, name, np.pad(rows, (0, size)), start, size)
                for i, rows in enumerate(numbers)
            ]

        channel = self._channel + (2 if self.row_shape(name) else 3)
        return self._in_blocks(block, channel)

    def _gather_rows(
        self, shard: int, name: str, rows: np.ndarray, start: int, size: int
    ) -> tf.Tensor:
        """Rows of a shard, [size, dim] or [size], in the host's memory."""
        variable = self._variables[shard][name]
        numbers = tf.constant(rows[start : start + size], tf.int64)
        # Reading the variable would copy all of it if it was updated sparsely.
        with tf.device(variable.device):
            block = tf.gather(variable, numbers)
        with tf.device("CPU:0"):
            return tf.identity(block)

    def _by_rank(self, values: Sequence[Any]) -> list[Any]:
        """Orders shards' values by rank, where this process has all shards."""
        ranks = self._replicas.ranks
        return [values[ranks.index(rank)] for rank in range(len(ranks))]

    def _in_blocks(
        self,
        block: Callable[[int, int], list[Any]],
        channel: int,
        sizes: list[int] | None = None,
    ) -> list[np.ndarray]:
        """Gathers all shards' values, each as long as it has keys, or says."""
        sizes = self.key_counts() if sizes is None else sizes
        size = min(self._capacity, max(1, BLOCK_ELEMENTS // self._dim))
        parts: list[list[np.ndarray]] = [[] for _ in sizes]
        # Once at least, for the shape of no rows.
        for start in range(0, max(1, *sizes), size):
            gathered = self._gather(block(start, size), channel)
            for part, rows in zip(
                parts, np.split(gathered, len(sizes)), strict=True
            ):
                part.append(rows)
        return [
            np.concatenate(part)[:n]
            for part, n in zip(parts, sizes, strict=True)
        ]

    def _gather(self, values: list[Any], channel: int) -> np.ndarray:
        """Gathers the local replicas' values, of one shape, from all."""
        tensors = [tf.convert_to_tensor(v) for v in values]
        specs = [tf.TensorSpec.from_tensor(t) for t in tensors]
        like = channel, tensors[0].dtype, tuple(tensors[0].shape)
        if like not in self._collect:

            def collect(*values: tf.Tensor) -> tf.Tensor:
                gathered = [
                    self._replicas.gather(i, value, channel)
                    for i, value in enumerate(values)
                ]
                return gathered[0]

            self._collect[like] = TracedOnce(collect, *specs)
        with waits.together(self._replicas, f"read the keys of {self._owner}"):
            return self._collect[like](*tensors).numpy()
