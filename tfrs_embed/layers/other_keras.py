"""Errors for a layer of one Keras that the other Keras calls.

A model trains and saves only layers of its own Keras. It calls a layer of the
other Keras like any function: without training or saving its variables.
"""

from __future__ import annotations

import sys
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import keras_versions
from tfrs_embed.compat.keras_versions import KERAS_3, TF_KERAS
from tfrs_embed.gradients import passes

_OTHER = {TF_KERAS: KERAS_3, KERAS_3: TF_KERAS}
_NAMES = {TF_KERAS: "tf_keras (Keras 2)", KERAS_3: "Keras 3"}
_ADVICE = {
    TF_KERAS: (
        "Keras 3 would neither train nor save its tables. Take the layer of "
        "this name in tfrs_embed.keras3; or, for tensorflow_recommenders, set "
        "the environment variable TF_USE_LEGACY_KERAS=1 before tensorflow is "
        "imported, which makes tf.keras tf_keras; or make the model of "
        "tf_keras.Model and tf_keras.Input."
    ),
    KERAS_3: (
        "tf_keras can't train its weights. Make the model of keras.Model and "
        "keras.Input, or take the layer of tfrs_embed itself."
    ),
}


def refuse_call(name: str, keras: Any, inputs: Any) -> None:
    """Raises a TypeError if a model of the other Keras calls a layer.

    It also does for symbolic inputs of the other Keras.
    """
    own = keras.__name__
    other = _OTHER[own]
    if other not in sys.modules:
        return
    for each in getattr(keras, "tree", tf.nest).flatten(inputs):
        if type(each).__name__.endswith("KerasTensor"):
            owner = keras_versions.keras_of(each)
            if owner is not None and owner.__name__ == other:
                raise _error(
                    f"Layer '{name}' is called with a KerasTensor of "
                    f"{_NAMES[other]}",
                    own,
                )
    caller = _caller(other)
    if caller is not None:
        raise _error(
            f"Layer '{name}' is called by {type(caller).__name__} "
            f"'{caller.name}' of {_NAMES[other]}",
            own,
        )


def refuse_gradient(name: str, weight: tf.Variable) -> None:
    """Raises a TypeError if a gradient is taken for Keras 3's variables alone.

    Some models of Keras 3 call their layers in a step of their own, which Keras
    3 has no call context of. Their variables don't include the layer's.
    """
    for running in passes.current_passes():
        owners = map(keras_versions.keras_of, tf.nest.flatten(running.sources))
        if not running.asks_for(weight) and any(
            owner is not None and owner.__name__ == KERAS_3 for owner in owners
        ):
            raise _error(
                f"The gradient of layer '{name}' is taken for variables of "
                "Keras 3 alone (if its tables are to stay as they are, call it "
                "with training=False)",
                TF_KERAS,
            )


def _caller(keras: str) -> Any:
    """The layer that a Keras is calling on this thread, or None.

    Of Keras 3, the first of nested layers. This imports neither Keras.
    """
    if keras == KERAS_3:
        module = sys.modules.get("keras.src.backend.common.global_state")
        get_state = getattr(module, "get_global_attribute", None)
        context = get_state and get_state("current_call_ctx")
        return getattr(context, "entry_layer", None)
    module = sys.modules.get("tf_keras.src.engine.base_layer_utils")
    get_context = getattr(module, "call_context", None)
    return get_context and get_context().layer


def _error(what: str, own: str) -> TypeError:
    return TypeError(
        f"{what}, but it is a layer of {_NAMES[own]}: {_ADVICE[own]}"
    )
