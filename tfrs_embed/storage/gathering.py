"""Collects arrays of all workers' shards, between training steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.graphs import TracedOnce
from tfrs_embed.distribution import long_waits
from tfrs_embed.distribution.replicas import Replicas, bucket_of

# A shard sends at most this many numbers of 64 bits in a block: 16 MiB.
_LARGEST = 1 << 21


class Gathering:
    """Collects one array of each shard, in all workers.

    Workers send an array's bytes in blocks of int64, since a collective's
    channel allows one dtype. `action` is what the workers do meanwhile, for the
    warning of a long wait.
    """

    def __init__(self, replicas: Replicas, action: str) -> None:
        self._replicas = replicas
        self._action = action
        self._channel = replicas.allocate(1)
        numbers = [tf.TensorSpec([None], tf.int64)] * replicas.local
        self._collect = TracedOnce(self._collective, *numbers)

    def __call__(self, here: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns each shard's array, by rank; all workers must call.

        `here` are the arrays of this process's shards, [n, ...] of one dtype.
        Only n may differ.
        """
        ranks = self._replicas.ranks
        if self._replicas.workers == 1:
            return [here[ranks.index(rank)] for rank in range(len(ranks))]
        counts = self._gather([np.array([len(a)], np.int64) for a in here])
        row = here[0].itemsize * int(np.prod(here[0].shape[1:]))
        most = -(-row * int(np.max(counts)) // 8)
        # The arrays' bytes, padded with zeros.
        sent = [
            np.frombuffer(a.tobytes().ljust(8 * most, b"\0"), np.int64)
            for a in here
        ]
        parts = [np.zeros([len(counts), 0], np.int64)]
        for start in range(0, most, _LARGEST):
            block = [s[start : start + _LARGEST] for s in sent]
            parts.append(self._gather(block))
        return [
            np.frombuffer(got.tobytes()[: row * n], here[0].dtype).reshape(
                [n, *here[0].shape[1:]]
            )
            for n, got in zip(
                counts[:, 0].tolist(), np.concatenate(parts, 1), strict=True
            )
        ]

    def numbers(self, here: Sequence[int]) -> list[int]:
        """Returns a number of each shard, by rank; all workers must call.

        `here` are the numbers of this process's shards.
        """
        arrays = self([np.array([number], np.int64) for number in here])
        return [int(array[0]) for array in arrays]

    def _gather(self, sent: Sequence[np.ndarray]) -> np.ndarray:
        """Gathers equally many int64 of each shard: [shards, n]."""
        with long_waits.together(self._replicas, self._action):
            gathered = self._collect(*map(tf.constant, sent)).numpy()
        by_rank = gathered.reshape([self._replicas.world, -1])
        return by_rank[:, : len(sent[0])]

    def _collective(self, *sent: tf.Tensor) -> tf.Tensor:
        capacity, bucket = bucket_of(tf.size(sent[0]))
        padding = [[0, capacity - tf.size(sent[0])]]
        gathered = [
            self._replicas.gather(
                i, tf.pad(numbers, padding), self._channel, bucket
            )
            for i, numbers in enumerate(sent)
        ]
        return gathered[0]
