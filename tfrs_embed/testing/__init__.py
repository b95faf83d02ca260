"""What helps to try and test models before there is a cluster for them.

Example:
    >>> strategy = tfrs_embed.testing.EmulatedTPUStrategy("v5p-8")
    >>> strategy.num_replicas_in_sync
    4
"""

from tfrs_embed.testing.emulated_tpu_strategy import EmulatedTPUStrategy
from tfrs_embed.testing.local_cluster import LocalCluster

__all__ = ["EmulatedTPUStrategy", "LocalCluster"]
