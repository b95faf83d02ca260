"""Gradients of concatenated activations, read as columns of one matrix.

The gradient of a model's concatenated activations is one matrix, which
TensorFlow copies into a tensor for each activation. The kernels read the
matrix's columns instead, and gradients of two bytes without a cast.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from tfrs_embed.compat.private_tensorflow import EagerTensor


class ConcatGradients(NamedTuple):
    """The positions of gradients in matrices.

    Attributes:
        matrices: the matrices, or gradients of their own: float32, or all
            bfloat16, or all float16.
        matrix_of: each gradient's matrix.
        columns: each gradient's first column.
    """

    matrices: list[tf.Tensor]
    matrix_of: list[int]
    columns: list[int]


def find_matrices(gradients: Sequence[tf.Tensor]) -> ConcatGradients:
    """Finds the matrices of which gradients, [count, dim] float32, are columns.

    A gradient is its own matrix unless its columns are known when tracing.
    """
    known: dict[Any, Any] = {}
    found = [_place(gradient, known) for gradient in gradients]
    numbers: dict[Any, int] = {}
    for matrix, _ in found:
        numbers.setdefault(matrix.ref(), len(numbers))
    matrices = [each.deref() for each in numbers]
    narrow = [_before_cast(matrix) for matrix in matrices]
    dtypes = {None if each is None else each.dtype for each in narrow}
    return ConcatGradients(
        narrow if dtypes in ({tf.bfloat16}, {tf.float16}) else matrices,
        [numbers[matrix.ref()] for matrix, _ in found],
        [column for _, column in found],
    )


def _place(gradient: tf.Tensor, known: dict[Any, Any]) -> tuple[tf.Tensor, int]:
    """Returns the matrix of a gradient, or itself, and its first column.

    `known` keeps, by operation that cuts gradients, the matrices made here or
    the parts' widths: one operation may cut hundreds.
    """
    source = _source(gradient)
    if source is None:
        return gradient, 0
    op, part = source.op, source.value_index
    if op.type == "Unpack" and op.get_attr("axis") in (1, -2):
        shape = op.inputs[0].shape
        if shape.rank != 3 or shape[2] is None:
            return gradient, 0
        if op not in known:
            width = op.get_attr("num") * shape[2]
            known[op] = tf.reshape(op.inputs[0], [-1, width])
        return known[op], part * shape[2]
    widths: list[int | None] = []
    if op.type == "SplitV":
        if op not in known:
            by_column = _constant(op.inputs[2]) == 1
            known[op] = _split_widths(op.inputs[1]) if by_column else []
        widths = known[op]
    elif op.type == "Slice":
        offset = op.inputs[1]
        source = offset.op
        if source.type == "ConcatOffset" and _constant(source.inputs[0]) == 1:
            if source not in known:
                known[source] = [_width(shape) for shape in source.inputs[1:]]
            widths = known[source]
            part = offset.value_index
    before = [width for width in widths[:part] if width is not None]
    if not widths or len(before) < part:
        return gradient, 0
    # The matrix may itself be a part of a larger one.
    matrix, first = _place(op.inputs[0], known)
    return matrix, first + sum(before)


def _before_cast(gradient: tf.Tensor) -> tf.Tensor | None:
    """Returns the tensor that was cast to a gradient, or None."""
    source = _source(gradient)
    if source is None or source.op.type != "Cast":
        return None
    return source.op.inputs[0]


def _source(tensor: tf.Tensor) -> tf.Tensor | None:
    """Returns the tensor before identities; None if it is not of a graph."""
    if tf.executing_eagerly() or isinstance(tensor, EagerTensor):
        return None
    while tensor.op.type == "Identity":
        tensor = tensor.op.inputs[0]
    return tensor


# Shapes are read from the graph: a gradient that used the activations would
# keep the kernels from writing these into the concatenation.


def _width(shape: tf.Tensor) -> int | None:
    """Returns the width of a matrix from its shape, [2]; None if unknown."""
    if shape.op.type in ("Shape", "ShapeN"):
        static = shape.op.inputs[shape.value_index].shape
        return static[1] if static.rank == 2 else None
    value = tf.get_static_value(shape)
    return None if value is None or value.size != 2 else int(value[1])


def _split_widths(sizes: tf.Tensor) -> list[int | None]:
    """Returns the sizes of a split, also of a concatenation's gradient."""
    value = tf.get_static_value(sizes)
    if value is not None:
        return value.tolist()
    # The row of the axis in the parts' shapes, which are stacked as columns.
    op = sizes.op
    for kind in ("Squeeze", "Slice"):
        if op.type != kind:
            return []
        op = op.inputs[0].op
    stacked = op.type == "Pack" and op.get_attr("axis") == 1
    return [_width(shape) for shape in op.inputs] if stacked else []


def _constant(tensor: tf.Tensor) -> int | None:
    """Returns a scalar's value if known when tracing, else None."""
    value = tf.get_static_value(tensor)
    if value is None and tensor.op.type == "FloorMod":
        # As the gradient of a concatenation takes its axis.
        axis, rank = (_constant(i) for i in tensor.op.inputs)
        return None if axis is None or not rank else axis % rank
    return None if value is None else int(value)
