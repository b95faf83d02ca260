"""A sharded table that gives rows to keys as these come.

A hash of a key decides its shard; the shard's key map says which row the key
has there. A key gets its row in the lookup of the training step that first uses
it.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import tensorflow as tf

from tfrs_embed.configs import FeatureSpec, TableSpec
from tfrs_embed.distribution import handshake
from tfrs_embed.distribution.exchange import Received, Route
from tfrs_embed.engines.collective import NEW_KEYS
from tfrs_embed.engines.options import EngineOptions
from tfrs_embed.engines.shard import Shard
from tfrs_embed.engines.sharded_keys import ShardedKeysEngine
from tfrs_embed.engines.table_group import rows_per_shard
from tfrs_embed.engines.tables.hashed import HashedTable
from tfrs_embed.engines.tables.key_map import UNKNOWN, KeyMap
from tfrs_embed.engines.tables.keyed_rows import KeyedRows
from tfrs_embed.engines.tables.state import TableState
from tfrs_embed.ops.checks import Checks, message
from tfrs_embed.optimizers.rules import TableOptimizer


class HashedEngine(ShardedKeysEngine):
    """Spreads keys of any value over the replicas of a strategy.

    Each shard has rows for vocabulary_size / replicas keys. A key without a row
    gets the next one of its shard where it is looked up for training; elsewhere
    its vector is zero and has no gradient.

    Args:
        features: one feature; its table's vocabulary_size is the number of keys
            that there is room for. The engine's keys are int64; unsigned ones
            have the same bits.
        optimizers: the table's optimizer by its name, or None if it is not
            trained.
        options: the other arguments.

    Raises:
        NotImplementedError: the strategy's collectives can't be used.
    """

    def __init__(
        self,
        features: Sequence[FeatureSpec],
        optimizers: dict[str, TableOptimizer | None],
        options: EngineOptions,
    ) -> None:
        super().__init__(features, optimizers, options)
        [feature] = features
        table = feature.table
        self._key_dtype = options.key_dtype
        self._capacity = rows_per_shard(table, self._replicas.world)
        self._maps: list[KeyMap] = []
        self._rows: KeyedRows | None = None
        self.states = {table.name: HashedTable(table, optimizers[table.name])}

    def _build(self) -> None:
        self._maps = [KeyMap() for _ in self._shards]
        super()._build()

    def _describe(self) -> handshake.Facts:
        facts = super()._describe()
        return {**facts, "": {**facts[""], "key_dtype": self._key_dtype.name}}

    def _expose(self, state: TableState) -> None:
        assert isinstance(state, HashedTable)
        table = state.spec
        self._rows = KeyedRows(
            self._name,
            self._capacity,
            "max_vocabulary_size_per_gpu",
            "A larger max_vocabulary_size_per_gpu makes it.",
            table.dim,
            self._maps,
            [shard.variables[table.name] for shard in self._shards],
            self._replicas,
            lambda: self._reset(table),
        )
        state.expose(self._rows, self._strategy)

    def _reset(self, table: TableSpec) -> None:
        """Gives all shards their initial rows and slots."""
        with warnings.catch_warnings():
            # Keras warns that an initializer without a seed repeats itself.
            warnings.simplefilter("ignore", UserWarning)
            self._fill(table)
        optimizer = self.optimizers[table.name]
        slots = optimizer.rule.slots() if optimizer else {}
        for shard in self._shards:
            for name, slot in slots.items():
                variable = shard.variables[table.name][name]
                with tf.device(shard.device):
                    variable.assign(tf.fill(variable.shape, slot.initial))

    @property
    def key_capacity(self) -> int:
        """See the base class."""
        return self._capacity

    def local_key_counts(self) -> dict[int, int]:
        """See the base class."""
        assert self._rows is not None
        return self._rows.local_key_counts()

    def key_counts(self) -> list[int]:
        """See the base class."""
        assert self._rows is not None
        return self._rows.key_counts()

    def _locate(
        self,
        replica: int,
        routes: Sequence[Route],
        received: Sequence[Received],
        training: bool,
    ) -> Sequence[Received]:
        [asked] = received
        keys = self._keys(replica, asked.rows)
        rows = self._maps[replica].find(keys)
        if training:
            rows = self._insert(replica, keys, rows, asked.mask)
        return [asked._replace(rows=rows)]

    def _find(self, replica: int, table: str, keys: tf.Tensor) -> tf.Tensor:
        return self._maps[replica].find(self._keys(replica, keys))

    def _insert(
        self, replica: int, keys: tf.Tensor, rows: tf.Tensor, mask: tf.Tensor
    ) -> tf.Tensor:
        """Gives rows to the keys that have none, on all shards or on none.

        Args:
            replica: the local replica whose shard it is.
            keys: [n] int64, as they were asked for.
            rows: [n] int64, the rows that they have.
            mask: [n] bool, which of the keys are no padding.

        Returns:
            [n] int64, the rows that they have now.
        """
        key_map = self._maps[replica]
        size = key_map.size()
        places = tf.where(mask & tf.equal(rows, UNKNOWN))
        new, index = tf.unique(tf.gather_nd(keys, places))
        consensus = self._consensus_on(NEW_KEYS)
        if consensus is not None:
            # The consensus is one collective more than a lookup has.
            self._traffic[replica].assign_add([1, 0, 0, 0])
        checks = Checks(consensus)
        checks.require(
            size + tf.size(new, tf.int64) <= self._capacity,
            lambda: self._no_room(replica, size, new),
        )
        new, index, places = checks.guard([new, index, places])
        given = size + tf.range(tf.size(new, tf.int64), dtype=tf.int64)
        key_map.insert(new, given)
        return tf.tensor_scatter_nd_update(
            rows, places, tf.gather(given, index)
        )

    def _no_room(
        self, replica: int, size: tf.Tensor, new: tf.Tensor
    ) -> tf.Tensor:
        # Other shards word this too, where only one of them is full.
        left = self._capacity - size
        key = new[left : left + 1]
        if self._key_dtype == tf.uint64:
            key = tf.bitcast(key, tf.uint64)
        return message(
            f"{self._name}: shard {self._replicas.ranks[replica]} is full: "
            f"max_vocabulary_size_per_gpu={self._capacity}, it holds ",
            size,
            " keys, and of the ",
            tf.size(new),
            " new ones in this step, key ",
            tf.reduce_sum(key),
            " is the first without room. A larger max_vocabulary_size_per_gpu "
            "makes room on all shards.",
        )

    def _read(
        self,
        shard: Shard,
        name: str,
        rows: tf.Tensor,
        training: bool = False,
        dtype: tf.DType | None = None,
    ) -> tf.Tensor:
        known = rows >= 0
        rows = tf.maximum(rows, 0)
        vectors = super()._read(shard, name, rows, training, dtype)
        return tf.where(known[:, None], vectors, tf.zeros_like(vectors))

    def _trained(self, received: Received) -> tf.Tensor:
        trained = received.mask & (received.rows >= 0)
        return tf.cast(tf.where(trained)[:, 0], tf.int32)
