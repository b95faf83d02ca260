"""The functions of an exported model, and the specs of their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import keras_versions
from tfrs_embed.serving.signatures import ServedFunction

DEFAULT_SIGNATURE = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY


def _is_layer(value: Any) -> bool:
    keras = keras_versions.keras_of(value)
    return keras is not None and isinstance(value, keras.layers.Layer)


def _labels(function: Any, number: int) -> list[str]:
    """The names of a function's arguments."""
    if _is_layer(function):
        function = function.call
    parameters = list(inspect.signature(function).parameters.values())
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    names = [p.name for p in parameters if p.kind not in variadic]
    if len(names) < number:
        return [f"inputs_{i}" for i in range(number)]
    return names[:number]


def served_functions(
    model: Any,
    input_signature: Any,
    signatures: Mapping[str, tuple[Callable[..., Any], Sequence[Any]]],
) -> dict[str, ServedFunction]:
    """Checks the arguments of `export`; returns functions by signature."""
    if not _is_layer(model):
        raise TypeError(
            f"Only a Keras model or layer can be exported, got {model!r}."
        )
    functions = {}
    if DEFAULT_SIGNATURE in signatures:
        pass
    elif type(model).call is not keras_versions.keras_of(model).Model.call:
        functions[DEFAULT_SIGNATURE] = _default(model, input_signature)
    elif not signatures or input_signature is not None:
        raise ValueError(
            f"'{model.name}' has no call method to serve: give export "
            "signatures, functions with the specs of their arguments, such as "
            "{'serving_default': (model.user_model, "
            "[tf.TensorSpec([None], tf.int64)])}."
        )
    for name, (function, arguments) in signatures.items():
        if not callable(function):
            raise TypeError(
                f"Signature '{name}' must be a function and its arguments' "
                f"specs, got {function!r}."
            )
        labels = _labels(function, len(arguments))
        functions[name] = ServedFunction(name, function, arguments, labels)
    return functions


def _default(model: Any, input_signature: Any) -> ServedFunction:
    """The model itself as a function."""
    if not model.built:
        raise ValueError(
            f"'{model.name}' can't be exported: it isn't built. Call it once, "
            "or train it; or give export signatures, 'serving_default' among "
            "them, which don't call the model."
        )
    if input_signature is None:
        input_signature = _inputs_of(model)
    return ServedFunction(
        DEFAULT_SIGNATURE,
        lambda inputs: model(inputs, training=False),
        [input_signature],
        ["inputs"],
        output_names=getattr(model, "output_names", None),
    )


def _inputs_of(model: Any) -> Any:
    """The specs of the inputs of a model's first call."""
    known = _save_spec(model)
    if known is None:
        raise ValueError(
            f"The inputs of '{model.name}' are not known, as Keras knows "
            "them only of models that were called, and Keras 3 only of "
            "functional models: give export an input_signature."
        )
    [inputs, *others], by_name = known
    others += [spec for name, spec in by_name.items() if name != "training"]
    # Keras remembers a None for all that is no tensor.
    specs = [isinstance(s, tf.TypeSpec) for s in tf.nest.flatten(inputs)]
    if others or not all(specs):
        raise ValueError(
            f"'{model.name}' was called with more than its first argument, or "
            "with something that is no tensor: give export an input_signature, "
            "which the model is called with alone, or signatures."
        )
    return inputs


def _save_spec(model: Any) -> Any:
    """The specs of a model's first call, positional and by name, or None."""
    if hasattr(model, "save_spec"):
        return model.save_spec()
    # Keras 3 only has the declared inputs of functional models.
    keras = keras_versions.keras_of(model)
    try:
        if isinstance(model, keras.Sequential):
            [inputs] = model.inputs
        else:
            inputs = model.input
    except (AttributeError, ValueError):
        return None
    return [tf.nest.map_structure(keras_versions.spec, inputs)], {}
