"""Functions of an exported model, with named inputs and outputs.

A ragged input "history" is the tensors "history_values" and
"history_row_splits". A sparse one is "history_indices", "history_values" and
"history_dense_shape".
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import Trackable, nest
from tfrs_embed.serving.tables import ServedTables

_SPECS = (tf.TensorSpec, tf.RaggedTensorSpec, tf.SparseTensorSpec)


class ServedFunction:
    """A function to export, and the named tensors of its arguments.

    Args:
        name: the signature's name.
        function: the function.
        arguments: each argument's nesting of `tf.TensorSpec`,
            `tf.RaggedTensorSpec` and `tf.SparseTensorSpec`.
        labels: the arguments' names. The inputs of a single argument, in a
            dict, are named by its keys alone.
        output_names: names of outputs that are in no dict.

    Raises:
        ValueError: an input has no name, or one that TensorFlow refuses.
        TypeError: an argument has something that is no spec.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        arguments: Sequence[Any],
        labels: Sequence[str],
        output_names: Sequence[str] | None = None,
    ) -> None:
        self._name = name
        self._function = function
        self._arguments = tuple(arguments)
        self._labels = labels
        self._output_names = output_names
        leaves = [
            leaf
            for argument, label in zip(self._arguments, labels, strict=True)
            for leaf in _named(argument, label, len(labels) == 1)
        ]
        specs = _named_parts(name, "input", leaves)
        _require_allowed(name, list(specs))
        # In the order of the arguments' tensors.
        self._tensors = {
            part: tf.TensorSpec(spec.shape, spec.dtype, part)
            for part, spec in specs.items()
        }

    @property
    def owner(self) -> Any:
        """The trackable object that the function is or is a method of."""
        owner = getattr(self._function, "__self__", self._function)
        return owner if isinstance(owner, Trackable) else None

    def trace(self, tables: ServedTables) -> tuple[Any, Any]:
        """Traces the function with `tables` in place of the layers' own.

        Returns a function with the user's arguments, and a concrete function
        that takes and returns named tensors.
        """

        def serve(*arguments: Any) -> Any:
            with tables.in_use():
                return self._function(*arguments)

        # Arguments may be given by keyword too.
        serve.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    label, inspect.Parameter.POSITIONAL_OR_KEYWORD
                )
                for label in self._labels
            ]
        )
        served = tf.function(serve, input_signature=self._arguments)

        @tf.function(autograph=False)
        def named(**tensors: tf.Tensor) -> dict[str, tf.Tensor]:
            components = [tensors[name] for name in self._tensors]
            given = nest.pack_sequence_as(
                self._arguments, components, expand_composites=True
            )
            outputs = served(*nest.map_structure(_checked, given))
            return self._named_outputs(outputs)

        return served, named.get_concrete_function(**self._tensors)

    def _named_outputs(self, outputs: Any) -> dict[str, tf.Tensor]:
        """The tensors of a nesting of outputs, by name."""
        leaves = list(_named(outputs, "output", alone=True))
        names = self._output_names or ()
        if not isinstance(outputs, Mapping) and len(names) == len(leaves):
            leaves = [
                (_word(name), leaf)
                for name, (_, leaf) in zip(names, leaves, strict=True)
            ]
        parts = _named_parts(self._name, "output", leaves)
        return {name: tf.identity(part) for name, part in parts.items()}


def _named(
    structure: Any, label: str, alone: bool
) -> Iterable[tuple[str, Any]]:
    """The leaves of a nesting, named by their places."""
    for path, leaf in nest.flatten_with_tuple_paths(structure):
        keys = any(isinstance(part, str) for part in path)
        given = isinstance(leaf, tf.TypeSpec) and getattr(leaf, "name", None)
        words = [str(part) for part in path]
        if given and not keys:
            words = [given]
        elif not (keys and alone):
            words = [label, *words]
        yield _word("_".join(words)), leaf


def _word(name: str) -> str:
    """Replaces all but letters of any alphabet, digits and underscores."""
    return re.sub(r"\W", "_", name)


def _named_parts(
    signature: str, kind: str, leaves: Iterable[tuple[str, Any]]
) -> dict[str, Any]:
    """The tensors or specs of named leaves, by unique names.

    `kind` is "input" or "output"; errors name it and the signature.
    """
    found: dict[str, Any] = {}
    for name, leaf in leaves:
        if not name:
            raise ValueError(
                f"Signature '{signature}': the {kind} of the key '' would have "
                "no name: give it another key."
            )
        parts = _parts(signature, kind, name, leaf)
        for part in parts:
            if part in found:
                raise ValueError(
                    f"Signature '{signature}': two {kind}s would be named "
                    f"'{part}'."
                )
        found.update(parts)
    return found


def _require_allowed(signature: str, names: Sequence[str]) -> None:
    """Raises a ValueError for inputs' names that TensorFlow refuses."""
    lower = [name.lower() for name in names]
    for name in names:
        letters = re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name)
        reserved = name == "self" or keyword.iskeyword(name)
        if not letters or reserved or lower.count(name.lower()) > 1:
            raise ValueError(
                f"Signature '{signature}': an input can't have the name "
                f"'{name}'. Names are letters, digits and underscores of "
                "ASCII, begin with a letter, aren't 'self' or a keyword of "
                "Python, and differ in more than case. Give export signatures, "
                "functions whose inputs have other names."
            )


def _parts(signature: str, kind: str, name: str, value: Any) -> dict[str, Any]:
    """The tensors or specs of one input or output, by name."""
    if kind == "input" and not isinstance(value, _SPECS):
        raise TypeError(
            f"Signature '{signature}': input '{name}' must be a tf.TensorSpec, "
            f"tf.RaggedTensorSpec or tf.SparseTensorSpec, got {value!r}."
        )
    if kind == "output" and not tf.is_tensor(value):
        raise TypeError(
            f"Signature '{signature}': output '{name}' must be a Tensor, a "
            f"RaggedTensor or a SparseTensor, got {type(value).__name__}."
        )
    names = [name]
    splits = getattr(value, "ragged_rank", 0)
    if isinstance(value, (tf.SparseTensor, tf.SparseTensorSpec)):
        names = [f"{name}_{p}" for p in ("indices", "values", "dense_shape")]
    elif splits:
        numbers = [""] if splits == 1 else [f"_{i}" for i in range(splits)]
        names = [f"{name}_values", *(f"{name}_row_splits{i}" for i in numbers)]
    parts = nest.flatten(value, expand_composites=True)
    return dict(zip(names, parts, strict=True))


def _checked(value: Any) -> Any:
    """An input; the row splits of a ragged input are checked."""
    if not isinstance(value, tf.RaggedTensor):
        return value
    return tf.RaggedTensor.from_nested_row_splits(
        value.flat_values, value.nested_row_splits, validate=True
    )
