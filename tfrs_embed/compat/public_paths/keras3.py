"""Leads to `tfrs_embed.layers.keras3`."""

from tfrs_embed.compat.public_paths import lead

lead(__name__, "tfrs_embed.layers.keras3")
