"""The functions of an exported model, and the specs of their arguments."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat import kerases
from tfrs_embed.compat.private_tensorflow import nest
from tfrs_embed.serving.signatures import ServedFunction

DEFAULT_SIGNATURE = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY


def _is_layer(value: Any) -> bool:
    keras = kerases.of(value)
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
    elif type(model).call is not kerases.of(model).Model.call:
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
        functions[name] = ServedFunction(
            name, function, arguments, labels, bare=len(arguments) == 1
        )
    return functions


def _default(model: Any, input_signature: Any) -> ServedFunction:
    """The model itself as a function."""
    if not model.built:
        raise ValueError(
            f"'{model.name}' can't be exported: it isn't built. Call it once, "
            "or train it; or give export signatures, 'serving_default' among "
            "them, which don't call the model."
        )
    arguments: dict[str, Any] = {}
    if input_signature is None:
        given = _save_spec(model)
        if given is None:
            raise ValueError(
                f"The inputs of '{model.name}' are not known, as Keras knows "
                "them only of models that were called, and Keras 3 only of "
                "functional models: give export an input_signature."
            )
        input_signature, arguments = _called_with(model, *given)
    names = list(arguments)
    first = "inputs"
    if first in names:
        first = next(iter(inspect.signature(model.call).parameters))

    def call(inputs: Any, *others: Any) -> Any:
        by_name = dict(zip(names, others, strict=True))
        return model(inputs, training=False, **by_name)

    return ServedFunction(
        DEFAULT_SIGNATURE,
        call,
        [input_signature, *arguments.values()],
        [first, *names],
        bare=True,
        output_names=getattr(model, "output_names", None),
    )


def _save_spec(model: Any) -> Any:
    """The specs of a model's first call, positional and by name, or None."""
    if hasattr(model, "save_spec"):
        return model.save_spec()
    # Keras 3 only has the declared inputs of functional models.
    keras = kerases.of(model)
    try:
        if isinstance(model, keras.Sequential):
            [inputs] = model.inputs
        else:
            inputs = model.input
    except (AttributeError, ValueError):
        return None
    return [tf.nest.map_structure(kerases.spec, inputs)], {}


def _called_with(
    model: Any, positional: Sequence[Any], by_name: Mapping[str, Any]
) -> tuple[Any, dict[str, Any]]:
    """The arguments of a model's first call: the first, and the others by name.

    `positional` has a None for each argument that is no tensor.
    """
    first, *others = inspect.signature(model.call).parameters.values()
    names = [p.name for p in others if p.kind is p.POSITIONAL_OR_KEYWORD]
    inputs, *rest = positional
    if len(names) < len(rest):
        raise ValueError(
            f"'{model.name}' was called with {len(positional)} arguments, and "
            f"its call has names for {len(names) + 1}: give export an "
            "input_signature, which it is called with alone, or signatures."
        )
    arguments = {**dict(zip(names, rest, strict=False)), **by_name}
    arguments.pop("training", None)
    for name, argument in {first.name: inputs, **arguments}.items():
        for path, spec in nest.flatten_with_tuple_paths(argument):
            if not isinstance(spec, tf.TypeSpec):
                place = "".join(f"[{key!r}]" for key in path)
                raise ValueError(
                    f"'{model.name}' was called with something that is no "
                    f"tensor as {name}{place}, which Keras doesn't remember: "
                    "give export an input_signature, which it is called with "
                    "alone, or signatures."
                )
    return inputs, arguments
