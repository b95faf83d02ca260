"""Keras 3 around layers of tf_keras, where nothing of theirs would work.

A Keras 3 model trains and saves the layers of Keras 3 that it finds in itself.
One of tf_keras it calls like any function: the model runs, but leaves the
layer's variables as they are, and out of its weights.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import tensorflow as tf

# How far from an attribute's assignment TensorFlow asks what was assigned.
_FRAMES = 12


def refuse_call(name: str, inputs: Any) -> None:
    """Raises where a Keras 3 layer or model calls a layer.

    Args:
        name: the layer's name.
        inputs: all that it is called with.

    Raises:
        TypeError: it is, or the inputs are symbolic ones of Keras 3.
    """
    if not _is_loaded():
        return
    symbolic = _attribute(
        "keras.src.backend.common.keras_tensor", "KerasTensor"
    )
    if symbolic is not None and any(
        isinstance(each, symbolic) for each in tf.nest.flatten(inputs)
    ):
        raise _error(f"Layer '{name}' is called with a KerasTensor of Keras 3")
    get_state = _attribute(
        "keras.src.backend.common.global_state", "get_global_attribute"
    )
    # Keras 3 has a context on a thread while its outermost layer is called.
    context = get_state and get_state("current_call_ctx")
    if context is not None:
        caller = _describe(getattr(context, "entry_layer", None))
        raise _error(f"Layer '{name}' is called by {caller}")


def refuse_owner(name: str) -> None:
    """Raises where a layer becomes an attribute of a Keras 3 layer or model.

    Some models call their layers in a step of their own, of which Keras 3 has
    no context. It has them be tracked by TensorFlow as they are assigned.

    Args:
        name: the layer's name.

    Raises:
        TypeError: it does.
    """
    if not _is_loaded():
        return
    layer: Any = _attribute("keras.src.layers.layer", "Layer")
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_FRAMES):
        if frame is None:
            return
        if frame.f_code.co_name == "__setattr__":
            owner = frame.f_locals.get("self")
            if isinstance(owner, layer):
                raise _error(
                    f"Layer '{name}' is made an attribute of {_describe(owner)}"
                )
            return
        frame = frame.f_back


def _is_loaded() -> bool:
    """Whether the program has Keras 3; nothing here imports it."""
    return "keras.src.layers.layer" in sys.modules


def _attribute(module: str, name: str) -> Any:
    return getattr(sys.modules.get(module), name, None)


def _describe(owner: Any) -> str:
    if owner is None:
        return "a layer of Keras 3"
    return f"{type(owner).__name__} '{getattr(owner, 'name', '?')}' of Keras 3"


def _error(what: str) -> TypeError:
    error = TypeError(
        f"{what}, but it is a layer of tf_keras (Keras 2): Keras 3 would "
        "neither train nor save its tables. Take the layer of this name in "
        "tfrs_embed.keras3; or, for tensorflow_recommenders, set the "
        "environment variable TF_USE_LEGACY_KERAS=1 before tensorflow is "
        "imported, which makes tf.keras tf_keras; or make the model of "
        "tf_keras.Model and tf_keras.Input."
    )
    # Keras's own mark: it then adds no inputs to the message.
    error._keras_call_info_injected = True  # type: ignore[attr-defined]
    return error
