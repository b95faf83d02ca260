"""Leads to `tfrs_embed.compat.progress`."""

from tfrs_embed.compat.public_paths import lead

lead(__name__, "tfrs_embed.compat.progress")
