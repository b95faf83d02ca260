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

The layers are those of tf_keras; `tfrs_embed.keras3` has those of Keras 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tfrs_embed import checkpoint, kernels, layers, optimizers
from tfrs_embed.compat import lazy, progress
from tfrs_embed.compat.version import __version__
from tfrs_embed.configs import types
from tfrs_embed.configs.dynamic_keys import (
    DecayingFrequency,
    DynamicKeys,
    FrequencyAdmission,
    ProbabilisticAdmission,
    TimeToLive,
)
from tfrs_embed.configs.file_storage import FileStorage
from tfrs_embed.configs.hashing import (
    Hash,
    Multiplex,
    PrefixNGrams,
    QuotientRemainder,
)
from tfrs_embed.configs.placement import Placement, TablePlacement
from tfrs_embed.configs.tables import FeatureConfig, TableConfig
from tfrs_embed.distribution.heartbeats import set_heartbeat_timeout
from tfrs_embed.gradients.passes import no_updates
from tfrs_embed.ops.embedding_lookup import embedding_lookup

if TYPE_CHECKING:
    from tfrs_embed import serving, sparsecore
    from tfrs_embed.layers import keras3 as keras3
    from tfrs_embed.layers.keras2 import (
        All2AllDenseEmbedding,
        DistributedEmbedding,
        DynamicEmbedding,
        Embedding,
        PartialTPUEmbedding,
    )
    from tfrs_embed.layers.model_average import (
        MovingAverageCallback,
        assign_moving_average,
    )
    from tfrs_embed.layers.sampled_softmax import sampled_softmax
    from tfrs_embed.sparsecore.mid_level.tpu_embedding_v2 import TPUEmbeddingV2
    from tfrs_embed.storage.retrieval import TopK
    from tfrs_embed.tools import data, monitoring, report, testing, tpu_check
    from tfrs_embed.tools.planner import (
        Hardware,
        Plan,
        ReplicaPlan,
        TablePlan,
        hot_rows,
        plan,
    )

__all__ = [
    "All2AllDenseEmbedding",
    "DecayingFrequency",
    "DistributedEmbedding",
    "DynamicEmbedding",
    "DynamicKeys",
    "Embedding",
    "FeatureConfig",
    "FileStorage",
    "FrequencyAdmission",
    "Hardware",
    "Hash",
    "MovingAverageCallback",
    "Multiplex",
    "PartialTPUEmbedding",
    "Placement",
    "Plan",
    "PrefixNGrams",
    "ProbabilisticAdmission",
    "QuotientRemainder",
    "ReplicaPlan",
    "TPUEmbeddingV2",
    "TableConfig",
    "TablePlacement",
    "TablePlan",
    "TimeToLive",
    "TopK",
    "__version__",
    "assign_moving_average",
    "checkpoint",
    "data",
    "embedding_lookup",
    "hot_rows",
    "kernels",
    "monitoring",
    "no_updates",
    "optimizers",
    "plan",
    "progress",
    "report",
    "sampled_softmax",
    "serving",
    "set_heartbeat_timeout",
    "sparsecore",
    "testing",
    "tpu_check",
    "types",
]


# Public modules have their files in rooms of the library.
__path__ += [f"{folder}/compat/public_paths" for folder in __path__]
lazy.import_later(
    __name__,
    {
        # A program of Keras 3 has no use for tf_keras.
        "tfrs_embed.layers.keras2": (
            "All2AllDenseEmbedding",
            "DistributedEmbedding",
            "DynamicEmbedding",
            "Embedding",
            "PartialTPUEmbedding",
        ),
        "tfrs_embed.layers.model_average": (
            "MovingAverageCallback",
            "assign_moving_average",
        ),
        "tfrs_embed.layers.sampled_softmax": ("sampled_softmax",),
        "tfrs_embed.sparsecore.mid_level.tpu_embedding_v2": ("TPUEmbeddingV2",),
        "tfrs_embed.storage.retrieval": ("TopK",),
        "tfrs_embed.tools.planner": (
            "Hardware",
            "Plan",
            "ReplicaPlan",
            "TablePlan",
            "hot_rows",
            "plan",
        ),
    },
    submodules=(
        "data",
        "keras3",
        "monitoring",
        "report",
        "serving",
        "sparsecore",
        "testing",
        "tpu_check",
    ),
)

# A Keras loads a saved model's layers by their registered names.
layers.register_layers()
