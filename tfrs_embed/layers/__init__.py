"""Keras layers: thin, without table logic.

Here is what makes each Keras find them in files before they are imported.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

import wrapt

from tfrs_embed.compat import keras_versions

_KERAS2 = f"{__name__}.keras2"
_KERAS3 = f"{__name__}.keras3"
_NAMES = (
    "All2AllDenseEmbedding",
    "DistributedEmbedding",
    "DynamicEmbedding",
    "Embedding",
    "PartialTPUEmbedding",
)


def register_layers() -> None:
    """Makes each Keras find this library's layers in files, once imported.

    Without the names of a file's layers tf_keras 2.21 ends in "'str' object is
    not callable" (November 2026), and importing it here takes seconds of each
    program. TensorFlow, too, needs wrapt.
    """
    wrapt.register_post_import_hook(
        lambda _: importlib.import_module(_KERAS2), keras_versions.TF_KERAS
    )
    wrapt.register_post_import_hook(_register_later, keras_versions.KERAS_3)


def _register_later(keras: Any) -> None:
    """Registers classes that import the layers of Keras 3 when one is loaded.

    TensorFlow imports Keras 3, and few of these programs have our layers of it.
    """
    if _KERAS3 in sys.modules:
        return
    for name in _NAMES:

        def from_config(config: Any, name: str = name) -> Any:
            layers = importlib.import_module(_KERAS3)
            return getattr(layers, name).from_config(config)

        methods = {"from_config": staticmethod(from_config)}
        keras_versions.register(keras)(
            type(name, (keras.layers.Layer,), methods)
        )
