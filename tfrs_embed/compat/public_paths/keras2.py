"""Leads to `tfrs_embed.layers.keras2`."""

from tfrs_embed.compat.public_paths import lead

lead(__name__, "tfrs_embed.layers.keras2")
