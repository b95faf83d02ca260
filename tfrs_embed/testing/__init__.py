"""What helps to try and test models before there is a cluster for them."""

from tfrs_embed.testing.emulated_tpu_strategy import EmulatedTPUStrategy
from tfrs_embed.testing.local_cluster import LocalCluster

__all__ = ["EmulatedTPUStrategy", "LocalCluster"]
