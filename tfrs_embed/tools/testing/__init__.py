"""Emulated TPU slices and local clusters, to test models on one machine.

Example:
    >>> strategy = tfrs_embed.testing.EmulatedTPUStrategy("v5p-8")
    >>> strategy.num_replicas_in_sync
    4
"""

from tfrs_embed.tools.testing.emulated_tpu_strategy import EmulatedTPUStrategy
from tfrs_embed.tools.testing.local_cluster import LocalCluster

__all__ = ["EmulatedTPUStrategy", "LocalCluster"]
