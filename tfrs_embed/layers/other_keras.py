"""Keras 3 around layers of tf_keras, where nothing of theirs would work.

A Keras 3 model trains and saves the layers of Keras 3 that it finds in itself.
One of tf_keras it calls like any function: the model runs, but leaves the
layer's variables as they are, and out of its weights.
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from tfrs_embed import kerases
from tfrs_embed.gradients import passes


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


def refuse_gradient(name: str, weight: tf.Variable) -> None:
    """Raises where a gradient is taken for Keras 3's variables alone.

    Some models of Keras 3 call their layers in a step of their own. Keras 3 has
    no context of it, and the model's variables have none of the layer.

    Args:
        name: the layer's name.
        weight: the scalar weight whose gradient updates the layer's tables.

    Raises:
        TypeError: a gradient that is being taken is.
    """
    for running in passes.here():
        if not running.asks_for(weight) and any(
            (keras := kerases.of(source)) is not None
            and keras.__name__ == kerases.KERAS_3
            for source in tf.nest.flatten(running.sources)
        ):
            raise _error(
                f"The gradient of layer '{name}' is taken for variables of "
                "Keras 3 alone (if its tables are to stay as they are, call it "
                "with training=False)"
            )


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
