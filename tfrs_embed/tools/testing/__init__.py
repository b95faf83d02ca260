"""Emulated TPU slices, local clusters and clocks, to test models.

Example:
    >>> strategy = tfrs_embed.testing.EmulatedTPUStrategy("v5p-8")
    >>> strategy.num_replicas_in_sync
    4
"""

from tfrs_embed.tools.testing.clocks import simulated_clock
from tfrs_embed.tools.testing.emulated_tpu_strategy import EmulatedTPUStrategy
from tfrs_embed.tools.testing.local_cluster import LocalCluster

__all__ = ["EmulatedTPUStrategy", "LocalCluster", "simulated_clock"]
