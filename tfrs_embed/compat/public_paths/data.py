"""Leads to `tfrs_embed.tools.data`."""

from tfrs_embed.compat.public_paths import lead

lead(__name__, "tfrs_embed.tools.data")
