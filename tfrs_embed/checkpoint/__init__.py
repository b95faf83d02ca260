"""Checkpoints of tables: one format, whatever holds the tables.

Example:
    >>> table = tfrs_embed.TableConfig("movie", 20_000, 64)
    >>> layer = tfrs_embed.PartialTPUEmbedding(
    ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
    ... )
    >>> _ = layer(tf.constant([3, 5]))
    >>> path = tf.train.Checkpoint(layer=layer).save("checkpoints/movies")
    >>> [key for key, _ in tf.train.list_variables(path) if "param" in key]
    ['layer/tables/movie/parameters/.ATTRIBUTES/VARIABLE_VALUE']
"""

# Registered with TensorFlow before there are layers: a checkpoint's tables are
# restored into tables, and into no other variable.
from typing import TYPE_CHECKING

from tfrs_embed.checkpoint import saver as saver
from tfrs_embed.checkpoint.growth import growing_tables
from tfrs_embed.compat import lazy

if TYPE_CHECKING:
    from tfrs_embed.checkpoint.delta_manager import DeltaManager
    from tfrs_embed.checkpoint.fit_position import FitPosition
    from tfrs_embed.checkpoint.save_callback import SaveCallback

__all__ = [
    "DeltaManager",
    "FitPosition",
    "SaveCallback",
    "growing_tables",
]

lazy.import_later(
    __name__,
    {
        "tfrs_embed.checkpoint.delta_manager": ("DeltaManager",),
        "tfrs_embed.checkpoint.fit_position": ("FitPosition",),
        "tfrs_embed.checkpoint.save_callback": ("SaveCallback",),
    },
)
