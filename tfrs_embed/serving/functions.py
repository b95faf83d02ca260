"""The functions of an exported model: what they take, and their traces."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed import kerases
from tfrs_embed._tensorflow import Trackable, nest
from tfrs_embed.serving.signatures import Signature, named_outputs
from tfrs_embed.serving.tables import ServedTables

DEFAULT_SIGNATURE = tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY


class ServedFunction:
    """A function to export, and its signature.

    Args:
        name: the signature's name.
        function: the function.
        arguments: its arguments' specs.
        labels: what it calls its arguments.
        output_names: what to call outputs that are no dict's.
        bare: of how many arguments, the first, the inputs' names don't begin
            with the argument's; None: of a single one.
        given: what errors say first if the function can't be called with the
            specs; None: nothing.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        labels: Sequence[str],
        output_names: Sequence[str] | None = None,
        bare: int | None = None,
        given: str | None = None,
    ) -> None:
        self._name = name
        self._given = given
        self._function = function
        self._labels = labels
        self._output_names = output_names
        with _explained(given):
            self._signature = Signature(name, arguments, labels, bare)

    @property
    def owner(self) -> Any:
        """The object whose method this is, which has variables, or None."""
        owner = getattr(self._function, "__self__", self._function)
        trackable = Trackable
        return owner if isinstance(owner, trackable) else None

    @property
    def renamed(self) -> dict[str, str]:
        """The names of inputs that TensorFlow has by another name, by that."""
        return self._signature.renamed

    def trace(self, tables: ServedTables) -> tuple[Any, Any]:
        """Traces it with the tables in place of the layers' own.

        Returns:
            The function that takes what the user's takes, and the concrete
            one that takes and returns named tensors.
        """

        def serve(*arguments: Any) -> Any:
            with tables.in_use():
                return self._function(*arguments)

        # They may be given by keyword too.
        serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    label, inspect.Parameter.POSITIONAL_OR_KEYWORD
                )
                for label in self._labels
            ]
        )
        served = tf.function(serve, input_signature=self._signature.arguments)

        @tf.function(autograph=False)
        def named(**tensors: tf.Tensor) -> dict[str, tf.Tensor]:
            outputs = served(*self._signature.pack(tensors))
            return named_outputs(self._name, outputs, self._output_names)

        with _explained(self._given):
            traced = named.get_concrete_function(**self._signature.tensors)
        return served, traced


@contextlib.contextmanager
def _explained(text: str | None) -> Iterator[None]:
    """Begins the messages of errors with a text, unless that is None."""
    try:
        yield
    except Exception as error:
        if text is None:
            raise
        kind = TypeError if isinstance(error, TypeError) else ValueError
        raise kind(f"{text} {error}") from error


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
    """Checks the functions to be exported.

    Args:
        model: the model.
        input_signature: its inputs' specs, or None; see `export`.
        signatures: more functions and their arguments' specs, by name.

    Returns:
        The functions by their signatures' names.

    Raises:
        TypeError: something is of a wrong kind.
        ValueError: the model isn't built, or its inputs are not known.
    """
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
            f"'{model.name}' has no call method, so what it is to serve is not "
            "known: give export signatures, functions with the specs of their "
            "arguments, such as {'serving_default': (model.user_model, "
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
    """The model itself, as a function of what it takes."""
    if not model.built:
        raise ValueError(
            f"'{model.name}' can't be exported: it isn't built. Call it once, "
            "or train it; or give export signatures, 'serving_default' among "
            "them, which don't call it."
        )
    arguments: dict[str, Any] = {}
    about = None
    if input_signature is not None:
        about = (
            f"'{model.name}' can't be called with its input_signature, a "
            f"{type(input_signature).__name__}: it stands for the model's "
            "first argument, without a list around it unless that is a list."
        )
    else:
        given = _save_spec(model)
        if given is None:
            raise ValueError(
                f"What '{model.name}' takes is not known, as only models "
                "that were called know it: give export an input_signature."
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
        getattr(model, "output_names", None),
        bare=1,
        given=about,
    )


def _save_spec(model: Any) -> Any:
    """What a Keras remembers of a model's first call, or declares; or None."""
    if hasattr(model, "save_spec"):
        return model.save_spec()
    # Keras 3 has nothing but what a functional model declares.
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
    """The arguments of the call that a model was first called by.

    Args:
        model: the model.
        positional: specs of the arguments that had no name. None stands for
            whatever is no tensor.
        by_name: those of the others, of tensors only.

    Returns:
        The first argument's specs, and the others' by name.
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
