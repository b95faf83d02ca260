"""The Keras of this process, and this library's layers of it."""

import importlib
import os

LEGACY = os.environ.get("TF_USE_LEGACY_KERAS") == "1"

keras = importlib.import_module("tf_keras" if LEGACY else "keras")


def layers():
    """The module with this library's layers."""
    name = "tfrs_embed" if LEGACY else "tfrs_embed.keras3"
    return importlib.import_module(name)
