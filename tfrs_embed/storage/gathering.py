"""Collects arrays of all workers' shards, between training steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from tfrs_embed.compat.graphs import TracedOnce
from tfrs_embed.distribution import waits
from tfrs_embed.distribution.replicas import Replicas

# A shard sends at most 2 to this power numbers of 64 bits at once: 16 MiB.
_LARGEST = 21


class Gathering:
    """Collects one array of each shard, in all workers.

    Workers send an array's bytes in blocks, padded to a power of two: a
    collective's channel allows one dtype, and one shape per bucket. `action` is
    what the workers do meanwhile, for the warning of a long wait.
    """

    def __init__(self, replicas: Replicas, action: str) -> None:
        self._replicas = replicas
        self._action = action
        self._channel = replicas.allocate(1)
        self._collect: dict[int, TracedOnce] = {}

    def __call__(self, here: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns each shard's array, by rank; all workers must call.

        `here` are the arrays of this process's shards, [n, ...] of one dtype.
        Only n may differ.
        """
        ranks = self._replicas.ranks
        if self._replicas.workers == 1:
            return [here[ranks.index(rank)] for rank in range(len(ranks))]
        counts = self._gather([np.array([len(a)], np.int64) for a in here], 0)
        row = here[0].itemsize * int(np.prod(here[0].shape[1:]))
        most = -(-row * int(np.max(counts)) // 8)
        # The arrays' bytes, padded with zeros.
        sent = [
            np.frombuffer(a.tobytes().ljust(8 * most, b"\0"), np.int64)
            for a in here
        ]
        parts = [np.zeros([len(counts), 0], np.int64)]
        start = 0
        while start < most:
            bucket = min(_LARGEST, int(most - start - 1).bit_length())
            block = [s[start : start + (1 << bucket)] for s in sent]
            parts.append(self._gather(block, bucket))
            start += 1 << bucket
        return [
            np.frombuffer(got.tobytes()[: row * n], here[0].dtype).reshape(
                [n, *here[0].shape[1:]]
            )
            for n, got in zip(
                counts[:, 0].tolist(), np.concatenate(parts, 1), strict=True
            )
        ]

    def _gather(self, sent: Sequence[np.ndarray], bucket: int) -> np.ndarray:
        """Gathers up to 2**bucket int64 of each shard: [shards, 2**bucket]."""
        size = 1 << bucket
        if bucket not in self._collect:
            spec = tf.TensorSpec([size], tf.int64)
            self._collect[bucket] = TracedOnce(
                functools.partial(self._collective, bucket), *[spec] * len(sent)
            )
        padded = [tf.constant(np.pad(s, (0, size - len(s)))) for s in sent]
        with waits.together(self._replicas, self._action):
            gathered = self._collect[bucket](*padded).numpy()
        return gathered.reshape([-1, size])

    def _collective(self, bucket: int, *sent: tf.Tensor) -> tf.Tensor:
        gathered = [
            self._replicas.gather(i, numbers, self._channel, bucket)
            for i, numbers in enumerate(sent)
        ]
        return gathered[0]
