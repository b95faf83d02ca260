"""Models for serving: SavedModels that need nothing of this library."""

from tfrs_embed.serving.export import export

__all__ = ["export"]
