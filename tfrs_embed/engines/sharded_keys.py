"""Tables whose rows belong to keys, spread over the replicas of a strategy."""

from __future__ import annotations

import tensorflow as tf

from tfrs_embed.distribution import key_shards
from tfrs_embed.engines.row_wise import RowWiseEngine
from tfrs_embed.ops.bags import BaggedIds


class ShardedKeysEngine(RowWiseEngine):
    """Sends keys to their shards, which find the keys' rows."""

    def _by_vectors(self, feature: int, bags: BaggedIds) -> bool:
        return False  # A bag's keys have to be found before they are rows.

    def _numbers(self, ids: tf.Tensor) -> tf.Tensor:
        return key_shards.numbers_of(ids, self._replicas.world)

    def _keys(self, replica: int, quotients: tf.Tensor) -> tf.Tensor:
        """The keys that were sent to a shard, from their numbers' quotients."""
        world, rank = self._replicas.world, self._replicas.ranks[replica]
        if world == 1:
            return quotients
        return key_shards.keys_of(quotients * world + rank, world)
