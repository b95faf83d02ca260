"""A model's inputs and outputs as a server knows them: tensors with names.

Ids of several lengths are several tensors: those of the ragged input "history"
are "history_values" and "history_row_splits", those of a sparse one
"history_indices", "history_values" and "history_dense_shape".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.util import nest


class Signature:
    """Named tensors that stand for a function's arguments.

    Args:
        name: the signature's name, for errors.
        arguments: for each argument a nesting of specs: `tf.TensorSpec`,
            `tf.RaggedTensorSpec`, `tf.SparseTensorSpec`.
        labels: what to call the arguments. The tensors of a single one that
            is a dict are called by its keys alone.

    Raises:
        TypeError: something else is among them.
        ValueError: two tensors would have one name.
    """

    def __init__(
        self, name: str, arguments: Sequence[Any], labels: Sequence[str]
    ) -> None:
        self.arguments = tuple(arguments)
        #: Each tensor's spec, by name.
        self.tensors: dict[str, tf.TensorSpec] = {}
        self._leaves: list[tuple[Any, list[str]]] = []
        alone = len(self.arguments) == 1
        for leaf_name, spec in itertools.chain.from_iterable(
            _named(argument, label, alone)
            for argument, label in zip(self.arguments, labels, strict=True)
        ):
            parts = _parts(name, leaf_name, spec)
            for part, tensor_spec in parts.items():
                if part in self.tensors:
                    raise ValueError(
                        f"Signature '{name}': two inputs would be named "
                        f"'{part}'."
                    )
                self.tensors[part] = tensor_spec
            self._leaves.append((spec, list(parts)))

    def pack(self, tensors: Mapping[str, tf.Tensor]) -> tuple[Any, ...]:
        """Makes the arguments of the tensors."""
        leaves = [
            _join(spec, [tensors[name] for name in names])
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
        ValueError: two tensors would have one name.
    """
    tensors: dict[str, tf.Tensor] = {}
    leaves = list(_named(outputs, "output", alone=True))
    flat = not isinstance(outputs, Mapping) and len(names or ()) == len(leaves)
    for i, (leaf_name, leaf) in enumerate(leaves):
        if names and flat:
            leaf_name = _word(names[i])
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
    """A name of letters, digits and underscores, as arguments have."""
    word = re.sub(r"\W", "_", name, flags=re.ASCII)
    return f"_{word}" if word[:1].isdigit() else word


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
