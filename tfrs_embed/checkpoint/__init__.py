"""Checkpoints of tables: one format, whatever holds the tables."""

from tfrs_embed.checkpoint.growth import growing_tables

__all__ = ["growing_tables"]
