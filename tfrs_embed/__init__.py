"""Embedding layers: one configuration for every accelerator.

Example:
    >>> import tensorflow as tf
    >>> import tfrs_embed
    >>> movies = tfrs_embed.TableConfig("movies", 20_000, 32)
    >>> layer = tfrs_embed.PartialTPUEmbedding(
    ...     tfrs_embed.FeatureConfig("movie", movies), "adagrad"
    ... )
    >>> layer(tf.constant([7, 42])).shape
    TensorShape([2, 32])
"""

from tfrs_embed import (
    checkpoint,
    kernels,
    serving,
    sparsecore,
    testing,
    tpu_check,
    types,
)
from tfrs_embed.backward_passes import no_updates
from tfrs_embed.configs import FeatureConfig, TableConfig
from tfrs_embed.layers.all2all_dense_embedding import All2AllDenseEmbedding
from tfrs_embed.layers.distributed_embedding import DistributedEmbedding
from tfrs_embed.layers.embedding import Embedding
from tfrs_embed.layers.partial_tpu_embedding import PartialTPUEmbedding
from tfrs_embed.mid_level.tpu_embedding_v2 import TPUEmbeddingV2
from tfrs_embed.ops.embedding_lookup import embedding_lookup
from tfrs_embed.placement import Placement, TablePlacement
from tfrs_embed.version import __version__

__all__ = [
    "All2AllDenseEmbedding",
    "DistributedEmbedding",
    "Embedding",
    "FeatureConfig",
    "PartialTPUEmbedding",
    "Placement",
    "TPUEmbeddingV2",
    "TableConfig",
    "TablePlacement",
    "__version__",
    "checkpoint",
    "embedding_lookup",
    "kernels",
    "no_updates",
    "serving",
    "sparsecore",
    "testing",
    "tpu_check",
    "types",
]
