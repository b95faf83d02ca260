"""Exports models for serving, as SavedModels that don't need this library.

Example:
    >>> table = tfrs_embed.TableConfig("movie", 20_000, 8)
    >>> layer = tfrs_embed.PartialTPUEmbedding(
    ...     tfrs_embed.FeatureConfig("movie", table), "adagrad"
    ... )
    >>> movie = tf_keras.Input([], dtype=tf.int64, name="movie")
    >>> model = tf_keras.Model(movie, layer(movie))
    >>> tfrs_embed.serving.export(model, "models/movies/1")
"""

from typing import TYPE_CHECKING

from tfrs_embed.compat import lazy

if TYPE_CHECKING:
    from tfrs_embed.serving.delta import export_delta
    from tfrs_embed.serving.exporting import export
    from tfrs_embed.serving.row_files import export_rows
    from tfrs_embed.serving.row_import import import_rows

__all__ = ["export", "export_delta", "export_rows", "import_rows"]

lazy.import_later(
    __name__,
    {
        "tfrs_embed.serving.delta": ("export_delta",),
        "tfrs_embed.serving.exporting": ("export",),
        "tfrs_embed.serving.row_files": ("export_rows",),
        "tfrs_embed.serving.row_import": ("import_rows",),
    },
)
