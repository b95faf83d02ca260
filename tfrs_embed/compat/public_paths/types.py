"""Leads to `tfrs_embed.configs.types`."""

from tfrs_embed.compat.public_paths import lead

lead(__name__, "tfrs_embed.configs.types")
