"""A model's inputs and outputs as a server knows them: tensors with names.

Ids of several lengths are several tensors: those of the ragged input "history"
are "history_values" and "history_row_splits", those of a sparse one
"history_indices", "history_values" and "history_dense_shape".

Servers take any text for a name. TensorFlow names inputs after the arguments of
a Python function, which can be neither "0" nor "日本": such inputs get other
arguments, and their names in the exported files.
"""

from __future__ import annotations

import itertools
import keyword
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tfrs_embed._tensorflow import nest


class Signature:
    """Named tensors that stand for a function's arguments.

    Args:
        name: the signature's name, for errors.
        arguments: for each argument a nesting of specs: `tf.TensorSpec`,
            `tf.RaggedTensorSpec`, `tf.SparseTensorSpec`.
        labels: what to call the arguments.
        bare: of how many of them, the first, the tensors are called by the
            keys alone where they are dicts. None: of a single one.

    Raises:
        TypeError: something else is among them.
        ValueError: two tensors would have one name, or one would have none.
    """

    def __init__(
        self,
        name: str,
        arguments: Sequence[Any],
        labels: Sequence[str],
        bare: int | None = None,
    ) -> None:
        self.arguments = tuple(arguments)
        if bare is None:
            bare = 1 if len(self.arguments) == 1 else 0
        specs: dict[str, tf.TensorSpec] = {}
        self._leaves: list[tuple[Any, list[str]]] = []
        for leaf_name, spec in itertools.chain.from_iterable(
            _named(argument, label, i < bare)
            for i, (argument, label) in enumerate(
                zip(self.arguments, labels, strict=True)
            )
        ):
            _require_name(name, "input", leaf_name)
            parts = _parts(name, leaf_name, spec)
            for part, tensor_spec in parts.items():
                if part in specs:
                    raise ValueError(
                        f"Signature '{name}': two inputs would be named "
                        f"'{part}'."
                    )
                specs[part] = tensor_spec
            self._leaves.append((spec, list(parts)))
        self._parameters = _parameters(specs)
        #: Each tensor's spec, by the argument that TensorFlow has for it.
        self.tensors = {
            parameter: tf.TensorSpec(
                specs[part].shape, specs[part].dtype, parameter
            )
            for part, parameter in self._parameters.items()
        }
        #: The names that TensorFlow can't have, by argument.
        self.renamed = {
            parameter: part
            for part, parameter in self._parameters.items()
            if parameter != part
        }

    def pack(self, tensors: Mapping[str, tf.Tensor]) -> tuple[Any, ...]:
        """Makes the arguments of the tensors, by TensorFlow's arguments."""
        leaves = [
            _join(spec, [tensors[self._parameters[name]] for name in names])
            for spec, names in self._leaves
        ]
        return nest.pack_sequence_as(self.arguments, leaves)


def named_outputs(
    name: str, outputs: Any, names: Sequence[str] | None = None
) -> dict[str, tf.Tensor]:
    """A function's outputs as named tensors.

    Args:
        name: the signature's name, for errors.
        outputs: a nesting of Tensors, RaggedTensors and SparseTensors.
        names: what to call outputs that are no dict's.

    Returns:
        The tensors by name.

    Raises:
        TypeError: something else is among them.
        ValueError: two tensors would have one name, or one would have none.
    """
    tensors: dict[str, tf.Tensor] = {}
    leaves = list(_named(outputs, "output", alone=True))
    flat = not isinstance(outputs, Mapping) and len(names or ()) == len(leaves)
    for i, (leaf_name, leaf) in enumerate(leaves):
        if names and flat:
            leaf_name = _word(names[i])
        _require_name(name, "output", leaf_name)
        for part, tensor in _split(name, leaf_name, leaf).items():
            if part in tensors:
                raise ValueError(
                    f"Signature '{name}': two outputs would be named '{part}'."
                )
            tensors[part] = tensor
    return tensors


def _named(
    structure: Any, label: str, alone: bool
) -> Iterable[tuple[str, Any]]:
    """The leaves of a nesting, each with a name of its place in it."""
    for path, leaf in nest.flatten_with_tuple_paths(structure):
        keys = any(isinstance(part, str) for part in path)
        words = [str(part) for part in path]
        if not keys and isinstance(leaf, tf.TypeSpec) and _name_of(leaf):
            words = [_name_of(leaf)]
        elif not (keys and alone):
            words = [label, *words]
        yield _word("_".join(words)), leaf


def _word(name: str) -> str:
    """A name of letters of any alphabet, digits and underscores."""
    return re.sub(r"\W", "_", name)


def _require_name(signature: str, kind: str, name: str) -> None:
    if not name:
        raise ValueError(
            f"Signature '{signature}': the {kind} of the key '' would have no "
            "name: give it another key."
        )


def _parameters(names: Iterable[str]) -> dict[str, str]:
    """An argument for each name that TensorFlow's functions may have.

    It is the name itself where possible. Two arguments differ in more than
    their case: otherwise TensorFlow's graphs could not tell them apart.
    """
    names = list(names)
    parameters: dict[str, str] = {}
    taken: set[str] = set()
    for name in names:
        if _may_be_parameter(name) and name.lower() not in taken:
            parameters[name] = name
            taken.add(name.lower())
    for name in names:
        if name in parameters:
            continue
        word = re.sub(r"\W", "_", name, flags=re.ASCII)
        # "arg_" is what tf.saved_model.load puts before such keywords.
        stem = word if _may_be_parameter(word) else f"arg_{word}"
        numbered = (f"{stem}_{i}" for i in itertools.count(1))
        parameters[name] = next(
            parameter
            for parameter in itertools.chain([stem], numbered)
            if parameter.lower() not in taken
        )
        taken.add(parameters[name].lower())
    return {name: parameters[name] for name in names}


def _may_be_parameter(name: str) -> bool:
    """Whether TensorFlow's functions may have an argument of that name."""
    letters = re.fullmatch("[A-Za-z][A-Za-z0-9_]*", name)
    return bool(letters) and not keyword.iskeyword(name) and name != "self"


def _name_of(spec: Any) -> str:
    """The name that a spec was given, if it has one."""
    return getattr(spec, "name", None) or ""


def _parts(signature: str, name: str, spec: Any) -> dict[str, tf.TensorSpec]:
    """The tensors of an input, by name."""
    if isinstance(spec, tf.TensorSpec):
        return {name: tf.TensorSpec(spec.shape, spec.dtype, name)}
    if isinstance(spec, tf.RaggedTensorSpec) and spec.ragged_rank:
        names = [f"{name}_values", *_splits(name, spec.ragged_rank)]
        rest = spec.shape[spec.ragged_rank + 1 :]
        specs = [tf.TensorSpec(tf.TensorShape([None]) + rest, spec.dtype)]
        splits = tf.TensorSpec([None], spec.row_splits_dtype)
        specs += [splits] * spec.ragged_rank
    elif isinstance(spec, tf.SparseTensorSpec):
        names = [f"{name}_{p}" for p in ("indices", "values", "dense_shape")]
        rank = spec.shape.rank
        specs = [
            tf.TensorSpec([None, rank], tf.int64),
            tf.TensorSpec([None], spec.dtype),
            tf.TensorSpec([rank], tf.int64),
        ]
    else:
        raise TypeError(
            f"Signature '{signature}': input '{name}' must be a tf.TensorSpec, "
            f"tf.RaggedTensorSpec or tf.SparseTensorSpec, got {spec!r}."
        )
    return {
        part: tf.TensorSpec(s.shape, s.dtype, part)
        for part, s in zip(names, specs, strict=True)
    }


def _splits(name: str, ragged_rank: int) -> list[str]:
    if ragged_rank == 1:
        return [f"{name}_row_splits"]
    return [f"{name}_row_splits_{i}" for i in range(ragged_rank)]


def _join(spec: Any, tensors: list[tf.Tensor]) -> Any:
    """Makes an input of its tensors."""
    if isinstance(spec, tf.SparseTensorSpec):
        indices, values, dense_shape = tensors
        sparse = tf.SparseTensor(indices, values, dense_shape)
        sparse.set_shape(spec.shape)
        return sparse
    value, *splits = tensors
    if not splits:
        return value
    # Checked: they come from outside.
    return tf.RaggedTensor.from_nested_row_splits(value, splits, validate=True)


def _split(signature: str, name: str, value: Any) -> dict[str, tf.Tensor]:
    """An output's tensors, by name."""
    if isinstance(value, tf.RaggedTensor):
        names = _splits(name, value.ragged_rank)
        return {
            f"{name}_values": value.flat_values,
            **dict(zip(names, value.nested_row_splits, strict=True)),
        }
    if isinstance(value, tf.SparseTensor):
        return {
            f"{name}_indices": value.indices,
            f"{name}_values": value.values,
            f"{name}_dense_shape": value.dense_shape,
        }
    if not tf.is_tensor(value):
        raise TypeError(
            f"Signature '{signature}': output '{name}' must be a Tensor, a "
            f"RaggedTensor or a SparseTensor, got {type(value).__name__}."
        )
    return {name: tf.identity(value)}
